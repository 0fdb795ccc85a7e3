"""``torchhal export``: write a trained model for use without torchhal."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from torchhal.cli._model_options import MODEL_ARGS_HELP, find_model, parse_model_args
from torchhal.cli._output import echo, output_to_stderr, print_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``torchhal export`` to its parser."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a file, the folder of a sharded checkpoint, or a URL")
    parser.add_argument("output", metavar="OUTPUT", help="the new file; README.md beside it is the model card")
    parser.add_argument(
        "--format",
        default=None,
        metavar="FORMAT",
        help="safetensors, torch_export or onnx; by default from the end of OUTPUT: .safetensors, .pt2, .onnx",
    )
    parser.add_argument(
        "--model", default=None, metavar="MODULE:CLASS", help="its class, or a function that returns a model"
    )
    parser.add_argument(
        "--model-args", default=None, metavar="JSON", help=f"{MODEL_ARGS_HELP}, over those in CHECKPOINT"
    )
    parser.add_argument(
        "--input",
        action="append",
        default=None,
        metavar="SHAPE",
        help="an argument of forward, 'float32[1,3,32,32]' or 'mask=bool[1,32]'; several times; by default the model's "
        "example_input_array",
    )
    parser.add_argument(
        "--weights",
        default=None,
        metavar="WHICH",
        help="average or running, where a callback has averaged them; by default the state_dict",
    )
    parser.add_argument(
        "--dtype", default=None, metavar="DTYPE", help="of the weights, such as float16; by default theirs"
    )
    parser.add_argument("--fixed-shapes", action="store_true", help="take no other batch size than that of the input")
    parser.add_argument("--no-model-card", action="store_true", help="write no README.md")
    parser.add_argument("--force", action="store_true", help="replace OUTPUT if it exists")
    parser.add_argument("--json", action="store_true", help="print JSON (schema 1)")
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    with output_to_stderr():
        from torchhal.export import export

        done = export(
            arguments.checkpoint,
            arguments.output,
            format=arguments.format,
            model=None if arguments.model is None else find_model(arguments.model),
            model_args=parse_model_args(arguments.model_args),
            example_input=arguments.input,
            weights=arguments.weights,
            dtype=arguments.dtype,
            dynamic_batch=not arguments.fixed_shapes,
            model_card=not arguments.no_model_card,
            force=arguments.force,
        )
    if arguments.json:
        print_json({"schema": 1, **asdict(done)})
        return 0
    echo(f"wrote {done.path} ({', '.join((done.format, *done.dtypes))})")
    if done.max_difference is not None:
        sizes = f", on batches of {' and '.join(map(str, done.batch_sizes))}" if done.batch_sizes else ""
        echo(f"largest difference to the module's outputs: {done.max_difference:.3g}{sizes}")
    for name, kept in done.tied.items():
        echo(f"{name} is in it as {kept}: they share memory")
    for note in done.notes:
        echo(f"note: {note}")
    return 0
