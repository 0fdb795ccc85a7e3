"""The share of torch's operators that give the same on the simulated accelerator as on the CPU.

    python benchmarks/simulator_operators.py [--flavour sim] [--processes 2] [--only NAME ... | --every N]

The operators and their sample inputs are torch's own database, the one that torch tests its backends with. An operator
agrees if for each of its float32 samples

- the outputs are on the device and equal the CPU's in dtype, shape and value, and so do the gradients of all inputs,
  from the same random cotangents;
- where the CPU raises, the device raises an error of the same type.

Of the operators that have them, the variants in place and with out= are judged as well, without gradients, on the
first samples of float32, complex64 and int64: the same results, in the memory that was given, which for out= has once
the right shape and once none. They have lines and shares of their own.

Values are equal within torch.testing's tolerance for their dtype, NaN equal to NaN; how many operators are equal to the
bit is printed, too. Operators that draw random numbers do so from the same seed. Of operators that return memory as it
is (empty and its kin), values aren't compared.

What isn't judged, and how much that is, is printed: operators for which the database has no float32 (such as
bitwise_and), operators that the CPU doesn't have either (it raises for every sample), and samples with sparse tensors,
which the device is documented not to have. The database also lists tests that torch expects to fail; that isn't
consulted: what the CPU can do, the device must.

Bound: 98 % of the operators agree, and of each kind of variant. Misses are printed with their reasons.
"""

import argparse
import itertools
import multiprocessing
import re
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch
from torch.utils import _pytree as pytree

from torchhal_simulator import load

BOUND = 0.98
UNDEFINED = re.compile(r"(new_)?empty(_like|_strided|_permuted)?")
HOST_ARGUMENTS = {"tensor_split"}  # documented to take their second argument from the CPU, whatever the device

VARIANTS = ("in place", "out=")
VARIANT_DTYPES = (torch.float32, torch.complex64, torch.int64)
VARIANT_SAMPLES = 2  # of each dtype
# With odd shapes its out= writes beyond its outputs on a plain CPU, too: any verdict would be chance, or a crash.
UNSAFE_OUT = {"lu_unpack"}

OPERATORS = {}


class Sparse(Exception):
    """A sample has a tensor of a layout that the device doesn't have."""


class Differs(Exception):
    """What an operator does on the device is not what it does on the CPU."""


@dataclass
class Verdict:
    """About one operator: why it misses, if it does, and what has been looked at."""

    name: str
    miss: str | None = None
    exact: bool = True
    samples: int = 0
    sparse: int = 0
    foreign: bool = True  # until the CPU has computed a sample
    variants: dict[str, str | None] = field(default_factory=dict)  # for each kind that the CPU has, why it misses


def tensors(value):
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def on(device, value):
    """A copy of all tensors in ``value`` with the same layout of memory, as leaves of a new graph."""
    storages = {}

    def copy(item):
        if item == "cpu" or isinstance(item, torch.device):
            return torch.device(device)
        if not isinstance(item, torch.Tensor):
            return item
        if item.layout is not torch.strided:
            raise Sparse
        source = item.detach()
        # A storage is copied as a whole: what overlaps on one device does so on the other.
        key = source.untyped_storage().data_ptr() or id(item)
        if key not in storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(source.untyped_storage())
            storages[key] = whole.to(device, copy=True).untyped_storage()
        target = torch.empty(0, dtype=source.dtype, device=device)
        target.set_(storages[key], source.storage_offset(), source.size(), source.stride())
        target = torch._neg_view(target) if source.is_neg() else target
        target = target.conj() if source.is_conj() else target
        return target.requires_grad_(item.requires_grad)

    return pytree.tree_map(copy, value)


def evaluate(op, sample, device):
    """Outputs and gradients of one sample on one device, or the errors it raises."""
    first, named = on(device, (sample.input, sample.kwargs))
    rest = sample.args if op.name in HOST_ARGUMENTS else on(device, sample.args)
    torch.manual_seed(0)
    try:
        results = op(first, *rest, **named)
    except Exception as error:
        return error, None
    outputs = pytree.tree_leaves(results)
    if not op.supports_autograd:
        return outputs, None
    inputs = [tensor for tensor in tensors((first, rest, named)) if tensor.requires_grad]
    roots = [tensor for tensor in tensors(sample.output_process_fn_grad(results)) if tensor.requires_grad]
    if not inputs or not roots:
        return outputs, None
    draw = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(root.shape, dtype=root.dtype, generator=draw).to(device) for root in roots]
    try:
        return outputs, list(torch.autograd.grad(roots, inputs, cotangents, allow_unused=True))
    except Exception as error:
        return outputs, error


def compare(expected, got, device, values=True):
    """Return whether all is equal to the bit; raise if something is not even close."""
    if expected is None and got is None:
        return True
    if not isinstance(expected, list) or not isinstance(got, list):
        if type(expected) is not type(got):
            raise Differs(f"{describe(got)}, but on the CPU {describe(expected)}")
        return True
    if len(expected) != len(got):
        raise Differs(f"{len(got)} result(s), but on the CPU {len(expected)}")
    exact = [same(theirs, mine, device, values) for theirs, mine in zip(expected, got, strict=True)]
    return all(exact)


def same(theirs, mine, device, values):
    if not isinstance(theirs, torch.Tensor) or not isinstance(mine, torch.Tensor):
        if mine != theirs and not (mine != mine and theirs != theirs):
            raise Differs(f"{mine!r}, but on the CPU {theirs!r}")
        return True
    if mine.device.type != device:
        raise Differs(f"the result is on {mine.device}")
    if (mine.dtype, mine.shape, mine.layout) != (theirs.dtype, theirs.shape, theirs.layout):
        raise Differs(f"{mine.dtype} {tuple(mine.shape)}, but on the CPU {theirs.dtype} {tuple(theirs.shape)}")
    if not values:
        return True
    mine, theirs = mine.detach().cpu(), theirs.detach()
    if torch.complex32 in (mine.dtype, theirs.dtype):  # it can hardly be compared
        mine, theirs = mine.to(torch.complex64), theirs.to(torch.complex64)
    if torch.allclose(mine, theirs, rtol=0, atol=0, equal_nan=True):
        return True
    try:
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    except AssertionError:
        difference = (mine.to(torch.complex128) - theirs.to(torch.complex128)).abs().max().item()
        raise Differs(f"differs from the CPU's by up to {difference:.3g}") from None
    return False


def describe(value):
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {(str(value).splitlines() or [''])[0]}"[:240]
    return "there is no gradient" if value is None else "it works"


def judge(name, flavour):
    op = OPERATORS[name]
    verdict = Verdict(name)
    what = "sample"
    try:
        for sample in op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd):
            verdict.samples += 1
            named = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
            given = any(isinstance(item, (torch.Tensor, torch.device)) or item == "cpu" for item in named)
            try:
                expected, expected_gradients = evaluate(op, sample, "cpu")
                got, gradients = evaluate(op, sample, flavour)
            except Sparse:
                verdict.sparse += 1
                continue
            verdict.foreign &= isinstance(expected, Exception)
            what = "forward"
            where = flavour if given else "cpu"  # a factory that is told no device makes CPU tensors on any machine
            verdict.exact &= compare(expected, got, where, values=not UNDEFINED.fullmatch(op.name))
            what = "gradient"
            verdict.exact &= compare(expected_gradients, gradients, where)
    except Differs as difference:
        verdict.miss = f"{what}, sample {verdict.samples}: {difference}"
    except Exception as error:
        verdict.miss = f"{what}, sample {verdict.samples}: {describe(error)}"
    judge_variants(op, verdict, flavour)
    return verdict


def in_place(op, sample, device, _):
    """The result of one sample, which is its input."""
    first, rest, named = on(device, (sample.input, sample.args, sample.kwargs))
    torch.manual_seed(0)
    result = op.get_inplace()(first, *rest, **named)
    if result is not first:
        raise Differs("the result is not the input")
    return [result]


def with_out(op, sample, device, outputs):
    """The results of one sample in memory of its own: first of the right shape, then of none."""
    first, rest, named = on(device, (sample.input, sample.args, sample.kwargs))
    results = []
    for make in (torch.zeros_like, lambda output, **options: torch.empty(0, dtype=output.dtype, **options)):
        given = [make(output, device=device) for output in outputs]
        torch.manual_seed(0)
        got = tensors(op(first, *rest, **named, out=given[0] if len(given) == 1 else tuple(given)))
        if got and [tensor.data_ptr() for tensor in got] != [tensor.data_ptr() for tensor in given]:
            raise Differs("the results are not in the memory that was given")
        results += given
    return results


def attempt(variant, op, sample, device, outputs):
    try:
        return variant(op, sample, device, outputs)
    except Sparse:
        raise
    except Exception as error:
        return error


def judge_variants(op, verdict, flavour):
    kinds = {}
    if op.get_inplace() is not None and op.name not in HOST_ARGUMENTS:
        kinds["in place"] = in_place
    if op.supports_out and op.name not in UNSAFE_OUT:
        kinds["out="] = with_out
    for kind, variant in kinds.items():
        for dtype in VARIANT_DTYPES:
            if dtype not in op.dtypes:
                continue
            what = f"{kind}, {dtype}"
            try:
                for sample in itertools.islice(op.sample_inputs("cpu", dtype), VARIANT_SAMPLES):
                    outputs = tensors(op(*on("cpu", (sample.input, *sample.args)), **on("cpu", sample.kwargs)))
                    expected = attempt(variant, op, sample, "cpu", outputs)
                    got = attempt(variant, op, sample, flavour, outputs)
                    if not isinstance(expected, Exception):
                        verdict.variants.setdefault(kind)
                    elif type(expected) is type(got):
                        continue  # nothing to compare: the CPU has no such variant, or not for this sample
                    compare(expected, got, flavour, values=not UNDEFINED.fullmatch(op.name))
            except Sparse:
                continue
            except Differs as difference:
                verdict.variants[kind] = f"{what}: {difference}"
            except Exception as error:
                verdict.variants[kind] = f"{what}: {describe(error)}"


def prepare(flavour):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # one order of summation
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    # Every sample looks through the stack for the test that wants it, and notes a seed, with a traceback, for devices
    # that aren't here: half of the time.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None
    load(flavour)
    OPERATORS.update((op.formatted_name, op) for op in op_db)


def judge_all(names, flavour):
    return [judge(name, flavour) for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flavour", default="sim", choices=("sim", "hpu"))
    parser.add_argument("--processes", type=int, default=2)
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--only", nargs="+", metavar="NAME", help="operators to judge; all of the database by default")
    some.add_argument("--every", type=int, default=1, metavar="N", help="judge one operator in N")
    arguments = parser.parse_args()
    start = time.perf_counter()
    flavour = arguments.flavour
    prepare(flavour)
    names = [name for name, op in OPERATORS.items() if torch.float32 in op.dtypes]
    other = len(OPERATORS) - len(names)
    names = arguments.only or names[:: arguments.every]
    parts = [names[index::32] for index in range(32)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, context, prepare, (flavour,)) as pool:
        verdicts = [verdict for part in pool.map(judge_all, parts, [flavour] * 32) for verdict in part]
    judged = [verdict for verdict in verdicts if not verdict.foreign]
    misses = [verdict for verdict in judged if verdict.miss]
    for verdict in sorted(misses, key=lambda verdict: verdict.name):
        print(f"miss: {verdict.name}: {verdict.miss}")
    print(
        f"not judged: {other} operators without float32; {len(verdicts) - len(judged)} that the CPU doesn't have or "
        f"whose samples are all sparse ({' '.join(sorted(verdict.name for verdict in verdicts if verdict.foreign))}); "
        f"{sum(verdict.sparse for verdict in verdicts)} of {sum(verdict.samples for verdict in verdicts)} samples, "
        "as sparse"
    )
    agree = len(judged) - len(misses)
    print(
        f"{agree} of {len(judged)} operators agree ({agree / len(judged):.2%}, bound {BOUND:.0%}), "
        f"{sum(verdict.exact for verdict in judged if not verdict.miss)} of them to the bit: {flavour} and cpu, "
        f"forward and gradient, {time.perf_counter() - start:.0f} s"
    )
    shares = [agree / len(judged)]
    for kind in VARIANTS:
        have = [verdict for verdict in verdicts if kind in verdict.variants]
        wrong = [verdict for verdict in have if verdict.variants[kind]]
        for verdict in sorted(wrong, key=lambda verdict: verdict.name):
            print(f"variant miss: {verdict.name}: {verdict.variants[kind]}")
        if have:
            shares.append(1 - len(wrong) / len(have))
            right = len(have) - len(wrong)
            print(f"{kind}: {right} of {len(have)} operators agree ({shares[-1]:.2%}, bound {BOUND:.0%})")
    return 0 if min(shares) >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
