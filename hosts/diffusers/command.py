"""The command line: renders one prompt at two qualities and says how the results differ."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from ...checkpoint.errors import CheckpointError
from ...comparison.images import eight_bit
from ...comparison.report import as_dict, text
from ...sampling.presets import PRESETS
from .default_prompt import DEFAULT_PROMPT
from .demo import DEMO_CHECKPOINT, DEMO_SIDE, unknown_words
from .settings import Settings, SettingsError

# Those of fusion.fusion, which must not be imported before `_device`: kernels/rows.py decides by the variable set there
# how many rows a program takes, and with one each the interpreter needs ten times as long.
_QUALITIES = ("off", "lossless", "high")

_SIDE = 1024  # pixels
_NAMED = 8  # words at most


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, or 2 where it could not do what was asked.

    Writes compare.png, difference.png and report.json; the report goes to standard output, its verdict first.
    """
    arguments = _parser().parse_args(argv)
    try:
        _run(arguments)
    except (CheckpointError, SettingsError, OSError) as error:
        return _refused(str(error))
    except (RuntimeError, MemoryError) as error:
        from ...kernels.memory import is_out_of_memory  # not sooner, as _QUALITIES says

        if not is_out_of_memory(error):
            raise
        reason = (str(error) or "unknown").splitlines()[0]
        return _refused(f"there is not enough memory: a smaller --width and --height need less ({reason})")
    return 0


def _refused(reason: str) -> int:
    print(f"ideogram4-fusion: {reason}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ideogram4-fusion", description="Renders one prompt at two qualities and says how the results differ."
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=DEMO_CHECKPOINT,
        metavar="DIR",
        help="a checkpoint folder in the official layout; default: the demo's own, which draws posters",
    )
    parser.add_argument("--preset", choices=PRESETS, default="INSTANT_8", help="default: %(default)s")
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="text or a JSON caption; default: a JSON caption")
    side = f"pixels, a multiple of 16; default: {_SIDE}, without --checkpoint {DEMO_SIDE}"
    parser.add_argument("--width", type=int, help=side)
    parser.add_argument("--height", type=int, help=side)
    parser.add_argument("--seed", type=int, default=0, help="of the noise; default: %(default)s")
    parser.add_argument(
        "--qualities",
        nargs=2,
        choices=_QUALITIES,
        default=_QUALITIES[1:],
        metavar=("A", "B"),
        help="two of off, lossless and high; default: lossless high",
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: %(default)s")
    parser.add_argument(
        "--output", type=Path, default=Path("output"), metavar="DIR", help="where to write; default: %(default)s"
    )
    return parser


def _run(arguments: argparse.Namespace) -> None:
    checkpoint: Path = arguments.checkpoint.expanduser()
    is_demo = checkpoint.resolve() == DEMO_CHECKPOINT
    side = DEMO_SIDE if is_demo else _SIDE
    settings = Settings(
        prompt=arguments.prompt,
        preset=PRESETS[arguments.preset],
        width=side if arguments.width is None else arguments.width,
        height=side if arguments.height is None else arguments.height,
        seed=arguments.seed,
    )
    if is_demo:
        if (settings.width, settings.height) != (side, side):
            _progress(f"the demo's model has learnt pictures of {side} x {side} pixels alone: others come out torn")
        if unknown := unknown_words(settings.prompt):
            words = ", ".join(f'"{word}"' for word in unknown[:_NAMED])
            named = f"{words}{', ...' if len(unknown) > _NAMED else ''}"
            _progress(f"the demo's model has never read {named}: docs/demo_model.md says what it knows")
    device = _device(arguments.device)
    output: Path = arguments.output.expanduser()
    output.mkdir(parents=True, exist_ok=True)

    # Only now: they import the kernels and Triton, which read the variable that `_device` sets.
    from transformers.utils.logging import disable_progress_bar

    from .compare import compare_qualities

    disable_progress_bar()
    if is_demo and device.type == "cpu":
        # Two gain little over work this small, and beside another busy process they wait for each other: one render
        # that takes 14 s alone took 84 s so, and 29 s with one thread.
        torch.set_num_threads(1)
    with warnings.catch_warnings():
        # diffusers' calls into transformers, by names that it is about to drop: nothing a user can act on.
        warnings.simplefilter("ignore", FutureWarning)
        comparison = compare_qualities(checkpoint, settings, tuple(arguments.qualities), device, _progress)
    _save_picture(comparison.side_by_side, output / "compare.png")
    _save_picture(comparison.difference, output / "difference.png")
    report = {**as_dict(comparison.report), "prompt": settings.prompt}
    (output / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(text(comparison.report))
    _progress(f"written to {output}: compare.png, difference.png, report.json")


def _device(name: str) -> torch.device:
    """The device asked for. On the CPU it has Triton interpret its kernels, if that is not imported yet.

    Raises:
        SettingsError: CUDA is asked for and absent.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise SettingsError("--device cuda: PyTorch finds no CUDA device")
    device = torch.device("cuda" if available and name != "cpu" else "cpu")
    if device.type == "cpu" and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    return device


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _save_picture(picture: torch.Tensor, path: Path) -> None:
    from PIL import Image

    Image.fromarray(eight_bit(picture[0]).numpy()).save(path)


if __name__ == "__main__":
    sys.exit(main())
