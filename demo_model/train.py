"""Trains the demo's model from nothing, or goes on with one, and writes its checkpoint folder.

    python -m ideogram4_fusion.demo_model.train OUTPUT [--seconds 500] [--start-from FOLDER] [--seed 0]

Made for one NVIDIA H200 and a limit of ten minutes: --seconds is the time for everything, of which all is the
transformer's that the rest does not take. With --start-from, the checkpoint of an earlier leg, the text encoder and the
VAE stay as they are and its transformer is trained on from its fp8 weights, through whose rounding it was trained. Give
each leg another seed. OUTPUT gets checkpoint/, state/ (float32 weights), two tar files of the former and train.json,
all of it before the first picture is drawn; then the pictures that `measure` reads, except of a preset whose time would
end after --seconds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from ..benchmarks import record
from ..checkpoint.folder import CheckpointFolder, model_file
from ..hosts.diffusers.conditioning import load_text_encoder
from ..hosts.diffusers.load import load_transformer, load_vae
from ..sampling.presets import PRESETS
from .autoencoder import measure_latents, new_autoencoder, train_autoencoder
from .drawing import as_rows, draw
from .examples import Captioned, cache_examples, held_out, training_set
from .export import AUTOENCODER_STATE, TRANSFORMER_STATE, write_autoencoder, write_text_parts, write_transformer
from .sample import Sampler, save_sheet
from .transformer import Examples, new_transformer, train_transformer

CHECKPOINT, STATE, LOG = "checkpoint", "state", "train.json"
SHEET_COLUMNS = 20
SHEETS = ("INSTANT_8", "FAST_20")
_MEASURED = 2048  # posters whose latents the VAE's statistics are taken from


class Training:
    """One run: where it writes, when it must end, and what it has measured so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.start = time.perf_counter()
        self.options = options
        self.output: Path = options.output
        root = self.output / CHECKPOINT
        self.folder = CheckpointFolder(
            root, root / "transformer", None, root / "text_encoder", root / "tokenizer", root / "vae"
        )
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # Of everything that runs as a host runs it; the CPU's is for trials.
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.log: dict[str, Any] = {
            "origin": record.origin(self.device),
            "options": {
                name: value.name if isinstance(value, Path) else str(value) for name, value in vars(options).items()
            },
            "seconds": {},
        }

    def run(self) -> None:
        torch.manual_seed(self.options.seed)
        (self.output / STATE).mkdir(parents=True, exist_ok=True)
        captioned = training_set(self.options.posters, self.options.seed)
        rows = as_rows([each.poster for each in captioned]).to(self.device)
        self._done("posters")
        if self.options.start_from is None:
            write_text_parts(self.folder.root)
            self._make_autoencoder(rows)
        else:
            shutil.copytree(self.options.start_from, self.folder.root, dirs_exist_ok=True)
        self._make_transformer(self._examples(captioned, rows))
        self._pack()
        self._done("archives")
        self._sample()
        self._done("all")

    def _make_autoencoder(self, rows: Tensor) -> None:
        autoencoder = new_autoencoder().to(self.device)
        end = time.perf_counter() + self.options.autoencoder_seconds
        self._follow("autoencoder", train_autoencoder(autoencoder, rows, end, self.options.autoencoder_batch))
        # Measured as it will be run.
        autoencoder.to(self.dtype, memory_format=torch.channels_last).requires_grad_(False)
        measure_latents(autoencoder, rows[:_MEASURED])
        write_autoencoder(self.folder.root, autoencoder)
        shutil.copy(model_file(self.folder.vae), self.output / STATE / AUTOENCODER_STATE)
        self._done("autoencoder")

    def _examples(self, captioned: list[Captioned], rows: Tensor) -> Examples:
        tokenizer = AutoTokenizer.from_pretrained(self.folder.tokenizer, local_files_only=True)
        autoencoder = load_vae(self.folder.vae, self.device, self.dtype).to(memory_format=torch.channels_last)
        encoder = load_text_encoder(self.folder, self.device, self.dtype)
        examples = cache_examples(captioned, rows, autoencoder, encoder, tokenizer)
        self.log["text_tokens"] = examples.features.shape[1]
        self._done("text features and latents")
        return examples

    def _make_transformer(self, examples: Examples) -> None:
        model = new_transformer()
        if self.options.start_from is not None:
            model.load_state_dict(load_transformer(model_file(self.folder.transformer), self.device)[0].state_dict())
        model.to(self.device)
        end = self.start + self.options.seconds - self.options.ending_seconds
        self._follow("transformer", train_transformer(model, examples, end, self.options.batch))
        weights = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
        save_file(weights, self.output / STATE / TRANSFORMER_STATE)
        write_transformer(self.folder.root, weights)
        self._done("transformer")

    def _sample(self) -> None:
        """Renders what `measure` looks at: the held-out captions."""
        captioned = held_out()[: self.options.pictures]
        captions = [each.caption for each in captioned]
        text = json.dumps(captions, indent=1, ensure_ascii=False)
        (self.output / "captions.json").write_text(text + "\n", encoding="utf-8")
        rows = as_rows([each.poster for each in captioned])
        drawn = draw(rows.to(self.device)).cpu()  # a CPU takes ten seconds for them
        boxed = torch.tensor([each.poster.boxed for each in captioned])
        sampler = Sampler(self.folder.root, self.device)
        a_step = 0.0  # seconds, of the preset before, everything included
        for name in SHEETS:
            start, steps = time.perf_counter(), PRESETS[name].steps
            if start + steps * a_step > self.start + self.options.seconds:
                print(f"{name}: left out, the time is over", flush=True)
                continue
            pictures = sampler.render(captions, PRESETS[name])
            error = pictures.permute(0, 3, 1, 2) / 127.5 - 1.0 - drawn
            psnr = -10.0 * torch.log10(error.square().mean((1, 2, 3)) / 4.0)
            self.log[name] = {"psnr_db_to_drawn": psnr.median().item(), "boxed": psnr[boxed].median().item()}
            save_sheet(pictures, self.output / f"{name}.png", SHEET_COLUMNS)
            self._done(name)
            a_step = (time.perf_counter() - start) / steps

    def _pack(self) -> None:
        """Two archives, so that neither is large: the transformer and all the rest."""
        parts = sorted(self.folder.root.iterdir())
        for name, wanted in (("transformer", True), ("rest", False)):
            with tarfile.open(self.output / f"{CHECKPOINT}_{name}.tar", "w") as archive:
                for part in parts:
                    if (part == self.folder.transformer) == wanted:
                        archive.add(part, f"{CHECKPOINT}/{part.name}")

    def _follow(self, name: str, reports: Iterator[dict[str, float]]) -> None:
        kept = self.log.setdefault(name, [])
        for report in reports:
            kept.append({key: float(f"{value:.5g}") for key, value in report.items()})
            print(name, kept[-1], flush=True)

    def _done(self, what: str) -> None:
        """Says when something was done, and writes the log as it is."""
        self.log["seconds"][what] = round(time.perf_counter() - self.start, 1)
        print(f"{self.log['seconds'][what]:7.1f} s: {what}", flush=True)
        record.write(self.output / LOG, self.log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=500.0, help="for all of it; default: %(default)s")
    parser.add_argument("--autoencoder-seconds", type=float, default=130.0, help="of them; default: %(default)s")
    parser.add_argument("--ending-seconds", type=float, default=20.0, help="left for pictures; default: %(default)s")
    parser.add_argument("--posters", type=int, default=98_304, help="in the training set; default: %(default)s")
    parser.add_argument("--batch", type=int, default=256, help="the transformer's; default: %(default)s")
    parser.add_argument("--autoencoder-batch", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--pictures", type=int, default=200, help="of the held-out captions; default: %(default)s")
    parser.add_argument("--start-from", type=Path, help="a checkpoint folder to go on with")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    Training(parser.parse_args()).run()


if __name__ == "__main__":
    main()
