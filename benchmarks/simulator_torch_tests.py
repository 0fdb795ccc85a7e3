"""The share of torch's own device-generic tests that pass on the simulated accelerator, and why the rest don't.

    python benchmarks/simulator_torch_tests.py                      # what the installed torch ships
    python benchmarks/simulator_torch_tests.py --tests pytorch/test # a checkout's test files, of the same release

torch offers its device-generic tests to devices outside of its tree: a test class is made for the device that
``PYTORCH_TESTING_DEVICE_ONLY_FOR=privateuse1`` names. The wheel ships that machinery and the databases of operators,
modules and optimizers, but no test file. So:

- its database of operators is judged by simulator_operators.py;
- its databases of modules and optimizers are judged here, through the same machinery: each module, on each of its
  samples, in training and evaluation, gives the CPU's outputs and gradients and takes its state there and back; each
  optimizer, with each of its samples, makes the CPU's steps, and its state taken to the CPU and back continues them;
- with ``--tests`` the files of FILES run as they are. A checkout of another release than the installed torch can fail
  for that alone.

Failures are printed by reason, the most frequent first. Bound: 95 % of the tests of the databases pass.
"""

import argparse
import copy
import os
import re
import sys
import tempfile
import unittest
import warnings
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from subprocess import DEVNULL, run

import torch

from torchhal_simulator import load

BOUND = 0.95
FILES = (
    "test_accelerator.py", "test_indexing.py", "test_modules.py", "test_optim.py", "test_shape_ops.py",
    "test_sort_and_select.py", "test_type_promotion.py", "test_view_ops.py",
)  # fmt: skip
ENVIRON = {"PYTORCH_TESTING_DEVICE_ONLY_FOR": "privateuse1", "PYTORCH_TESTING_DEVICE_FOR_CUSTOM": "privateuse1"}
ON_DEVICE = "import sys, pytest, torchhal_simulator as s; s.load(); sys.exit(pytest.main(sys.argv[1:]))"


def moved(value, device):
    """A copy of a nested structure with its tensors on ``device``, as leaves of a new graph."""

    def move(item):
        if not isinstance(item, torch.Tensor):
            return item
        return item.detach().to(device, copy=True).requires_grad_(item.requires_grad)

    return torch.utils._pytree.tree_map(move, value)


def tensors(value):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def forward_and_backward(module, arguments, named):
    """Outputs, and the gradients of inputs and parameters from the sum of the outputs."""
    torch.manual_seed(0)
    outputs = tensors(module(*arguments, **named))
    roots = [output.sum() for output in outputs if output.requires_grad]
    leaves = [leaf for leaf in (*tensors((arguments, named)), *module.parameters()) if leaf.requires_grad]
    gradients = torch.autograd.grad(sum(roots), leaves, allow_unused=True) if roots and leaves else ()
    return outputs, gradients


def make_cases():
    """The test classes of the databases; torch's machinery makes the device's out of them."""
    from torch.testing._internal.common_device_type import instantiate_device_type_tests
    from torch.testing._internal.common_modules import module_db, modules
    from torch.testing._internal.common_optimizers import optim_db, optims
    from torch.testing._internal.common_utils import TestCase

    class TestModules(TestCase):
        def samples(self, info, dtype, training):
            made = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=training, training=training)
            for sample in made:
                if sample.forward_input is None:
                    continue
                torch.manual_seed(0)
                reference = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
                reference = reference.to(dtype).train(training)
                if any(map(torch.nn.parameter.is_lazy, reference.parameters())):
                    reference(*sample.forward_input.args, **sample.forward_input.kwargs)
                yield reference, sample.forward_input

        @modules(module_db, allowed_dtypes=[torch.float32])
        def test_like_cpu(self, device, dtype, module_info, training):
            count = 0
            for reference, inputs in self.samples(module_info, dtype, training):
                module = copy.deepcopy(reference).to(device)
                arguments, named = inputs.args, inputs.kwargs
                expected = forward_and_backward(reference, moved(arguments, "cpu"), moved(named, "cpu"))
                got = forward_and_backward(module, moved(arguments, device), moved(named, device))
                self.assertTrue(all(output.device.type == torch.device(device).type for output in got[0]))
                self.assertEqual(got, expected, exact_device=False)
                self.assertEqual(module.state_dict(), reference.state_dict(), exact_device=False)  # running statistics
                count += 1
            if not count:
                self.skipTest("the database has no input for its forward")

        @modules(module_db, allowed_dtypes=[torch.float32])
        def test_there_and_back(self, device, dtype, module_info, training):
            for reference, _ in self.samples(module_info, dtype, training):
                module = copy.deepcopy(reference).to(device)
                self.assertEqual(module.state_dict(), reference.state_dict(), exact_device=False)
                self.assertEqual(copy.deepcopy(module).cpu().state_dict(), reference.state_dict())
                with tempfile.TemporaryFile() as file:
                    torch.save(module.state_dict(), file)
                    file.seek(0)
                    saved = torch.load(file, weights_only=True)
                self.assertEqual(saved, module.state_dict())

    class TestOptimizers(TestCase):
        def steps(self, optimizer, parameters, first, last):
            for step in range(first, last):
                for index, parameter in enumerate(parameters):
                    draw = torch.Generator().manual_seed(100 * step + index)
                    gradient = torch.randn(parameter.shape, dtype=parameter.dtype, generator=draw)
                    parameter.grad = gradient.to(parameter.device)
                closure = lambda: torch.stack([(parameter * parameter).sum() for parameter in parameters]).sum()  # noqa: E731
                optimizer.step(closure)

        def parameters(self, info, dtype, device):
            draw = torch.Generator().manual_seed(0)
            shapes = ((4, 3), (3, 5))  # Muon takes matrices only
            drawn = [torch.randn(shape, dtype=dtype, generator=draw) for shape in shapes]
            return [torch.nn.Parameter(parameter.to(device)) for parameter in drawn]

        @optims([info for info in optim_db if not info.only_supports_sparse_grads], dtypes=[torch.float32])
        def test_like_cpu(self, device, dtype, optim_info):
            for sample in optim_info.optim_inputs_func(device="cpu", dtype=dtype):
                named = {key: moved(value, "cpu") for key, value in sample.kwargs.items()}
                reference, mine = (self.parameters(optim_info, dtype, where) for where in ("cpu", device))
                theirs = optim_info.optim_cls(reference, **named)
                self.steps(theirs, reference, 0, 3)
                ours = optim_info.optim_cls(mine, **{key: moved(value, device) for key, value in named.items()})
                self.steps(ours, mine, 0, 3)
                self.assertEqual(mine, reference, exact_device=False)
                state = moved(ours.state_dict(), "cpu")
                again = [torch.nn.Parameter(parameter.detach().clone()) for parameter in mine]
                continued = optim_info.optim_cls(again, **{k: moved(value, device) for k, value in named.items()})
                continued.load_state_dict(state)
                self.steps(continued, again, 3, 5)
                self.steps(theirs, reference, 3, 5)
                self.assertEqual(again, reference, exact_device=False)

    made = {}
    for generic in (TestModules, TestOptimizers):
        made[generic.__name__] = generic
        generic.__module__ = __name__
        instantiate_device_type_tests(generic, made)
    return [case for name, case in made.items() if name not in ("TestModules", "TestOptimizers")]


def judge_databases():
    """Run the databases' tests: their number, the failures' reasons, and the number of skipped ones."""
    suite = unittest.TestSuite()
    for case in make_cases():
        suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(case))
    with open(os.devnull, "w") as nowhere:
        result = unittest.TextTestRunner(stream=nowhere, verbosity=0).run(suite)
    wrong = [(test.id().rpartition(".")[2], text) for test, text in (*result.failures, *result.errors)]
    return result.testsRun - len(result.skipped), wrong, len(result.skipped)


def judge_file(file):
    """Run one of torch's test files on the device, in a process of its own: as :func:`judge_databases`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-c", ON_DEVICE, str(file), "-q", f"--junit-xml={report}", "-p", "no:cacheprovider"]
        run(command, env={**os.environ, **ENVIRON}, cwd=file.parent, stdout=DEVNULL, stderr=DEVNULL, check=False)
        if not report.exists():
            return 0, [(file.name, "the process ended before the tests did")], 0
        cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    wrong = []
    for case in cases:
        for failure in (*case.findall("failure"), *case.findall("error")):
            wrong.append((case.get("name", ""), failure.get("message") or failure.text or ""))
    return len(cases) - skipped, wrong, skipped


def reason(text):
    """The error's last line without what differs from case to case: addresses, numbers, quoted names."""
    lines = [line.strip() for line in text.splitlines() if re.match(r"\s*(\w+\.)*\w*(Error|Exception|Skip)\b", line)]
    line = lines[-1] if lines else (text.strip().splitlines() or ["no message"])[-1]
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "N", line)[:160]


def show(name, made, wrong, skipped):
    share = 1 - len(wrong) / made if made else 0.0
    print(f"{name}: {made - len(wrong)} of {made} tests pass ({share:.1%}), {skipped} skipped by torch")
    for why, count in Counter(reason(text) for _, text in wrong).most_common():
        first = next(test for test, text in wrong if reason(text) == why)
        print(f"  {count} x {why}  (such as {first})")
    return share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=Path, metavar="FOLDER", help="the folder 'test' of a checkout of torch")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    load()
    os.environ.update(ENVIRON)
    if arguments.tests is None:
        return 0 if show("databases of modules and optimizers", *judge_databases()) >= BOUND else 1
    for name in FILES:
        if (arguments.tests / name).exists():
            show(name, *judge_file((arguments.tests / name).resolve()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
