"""Train the demo target and draft on the standard library of the running Python.

    python -m training.train all --log .train/log.txt

On Linux, set MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=8589934592 in the
environment. The allocator then keeps its pages between steps, which cuts page faults to a fifth.

The stages tokenizer, target, draft and evaluate can run separately. A model stage ends when its
budget of minutes or of tokens is used up. It saves checkpoints regularly and continues from the
last checkpoint with --resume. metrics.json in this folder collects facts about the result.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from training import attention, card, corpus, evaluate, tokenization
from training.data import Ids, PackedStream, encode_documents, even_windows
from training.losses import Teacher, output_loss
from training.recipes import RECIPES, Phase

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".train"
DEMO = ROOT / "backends" / "engine" / "demo"
METRICS = DEMO / "metrics.json"
CARD = DEMO / "MODEL_CARD.md"
MODELS = {"target": DEMO / "target", "draft": DEMO / "draft"}

logger = logging.getLogger("train")


WARMUP = 0.02
"""Share of the budget over which the rate rises to its peak."""

COOLDOWN = 0.8
"""Share of the budget over which the rate falls to zero, linearly."""

MICRO_TOKENS = 4096
"""Tokens per forward pass. Larger passes were slower, because activations leave the cache."""

CLIP = 1.0
"""Largest gradient norm. Only early spikes reach this norm."""

AGREEMENT_WINDOWS, AGREEMENT_LENGTH = 96, 1024
"""Number and length of windows: about 100,000 positions, for a standard error below 0.2 points."""

POSITION_WINDOWS = 24
"""Number of 8,192-token windows for the loss by position, about a quarter of the held-out tokens.
"""

COUPLED_TEMPERATURE = 0.8


def build_model(name: str, seed: int) -> LlamaForCausalLM:
    """Return a newly initialised model in float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **RECIPES[name].shape,
        vocab_size=tokenization.VOCAB_SIZE,
        max_position_embeddings=tokenization.CONTEXT,
        # The slowest of the 16 rotations has a period of 35,000 positions, more than 8,192.
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention.NAME,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:  # Layers start as the identity for steadier early steps.
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def build_optimizers(
    model: torch.nn.Module,
    hidden: Iterable[Tensor],
    matrix_rate: float,
    other_rate: float,
) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices, and AdamW for all other parameters of a model."""
    matrices = [p for p in hidden if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices, lr=matrix_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def rate_factor(progress: float) -> float:
    """Return the learning rate at a share of the budget (0..1), as a share of its peak."""
    return max(0.0, min(1.0, progress / WARMUP + 0.01, (1.0 - progress) / COOLDOWN))


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the model as a bfloat16 Hugging Face checkpoint with its tokenizer."""
    config = LlamaConfig.from_dict(model.config.to_dict())
    config.dtype = torch.bfloat16
    copy = LlamaForCausalLM(config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.save_pretrained(folder)
    tokenization.write(tokenization.read(MODELS["target"]), folder)


def load_model(folder: Path) -> LlamaForCausalLM:
    """Return a saved model in float32, in evaluation mode."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention.NAME
    )
    return model.eval()


def documents(paths: list[Path]) -> list[Ids]:
    """Return the token ids of corpus files. Each array begins with the separator."""
    tokenizer = tokenization.read(MODELS["target"])
    separator = tokenizer.token_to_id(tokenization.END_OF_TEXT)
    assert separator is not None
    return encode_documents(tokenizer, corpus.load(paths), separator)


def record(section: str, facts: dict[str, Any]) -> None:
    """Merge facts into a section of metrics.json."""
    metrics = json.loads(METRICS.read_text()) if METRICS.exists() else {}
    metrics[section] = {**metrics.get(section, {}), **facts}
    METRICS.write_text(json.dumps(metrics, indent=2) + "\n")


def device_name() -> str:
    """Return a description of the training device."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


class Run:
    """The training of a model, from the start or the last checkpoint to the end of its budget."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.recipe = RECIPES[name]
        self.options = options
        self.minutes_budget = options.minutes or self.recipe.minutes
        self.model = build_model(name, options.seed).train()
        layers, recipe = self.model.model.layers.parameters(), self.recipe
        self.optimizers = build_optimizers(
            self.model, layers, recipe.matrix_rate, recipe.other_rate
        )
        self.stream = PackedStream(documents(corpus.training_files()), options.seed)
        self.held_out = documents(corpus.held_out_files())
        self.teacher = load_model(MODELS["target"]) if self.recipe.teacher_share else None
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.checkpoint = WORK / f"{name}.pt"

    def progress(self) -> float:
        """Return the used share of the budget, 0..1."""
        shares = [self.seconds / 60 / self.minutes_budget]
        if self.options.tokens:
            shares.append(self.tokens / self.options.tokens)
        return max(shares)

    def save(self) -> None:
        """Write a checkpoint, and replace the previous checkpoint after the write."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "counters": (self.step, self.tokens, self.seconds),
            "stream": (self.stream.epoch, self.stream.cursor, self.stream.length),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def load(self) -> None:
        """Continue from the saved checkpoint."""
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.seconds = state["counters"]
        self.stream.seek(*state["stream"])

    def _hidden(self, model: LlamaForCausalLM, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            states: Tensor = model.model(input_ids=ids, use_cache=False).last_hidden_state
        return states.flatten(0, 1)

    def _teacher(self, ids: Tensor) -> Teacher | None:
        if self.teacher is None:
            return None
        with torch.no_grad():
            hidden = self._hidden(self.teacher, ids)
        weight = self.teacher.lm_head.weight.detach().to(torch.bfloat16)
        return Teacher(hidden, weight, self.recipe.teacher_share)

    def micro_losses(self, phase: Phase) -> Iterator[float]:
        """Run forward and backward for the batch of a step, and yield the loss of each part."""
        rows = max(1, phase.batch_tokens // phase.length)
        batch = self.stream.batch(rows, phase.length)
        parts = batch.split(max(1, MICRO_TOKENS // phase.length))
        for part in parts:
            hidden = self._hidden(self.model, part[:, :-1])
            labels = part[:, 1:].flatten()
            weight = self.model.lm_head.weight
            loss = output_loss(hidden, weight, labels, self._teacher(part[:, :-1]))
            (loss / len(parts)).backward()
            yield loss.item()
        self.tokens += rows * phase.length

    def update(self) -> float:
        """Take an optimiser step, and return its training loss in nats per token."""
        progress = self.progress()
        phase = next(p for p in self.recipe.phases if progress < p.until)
        losses = list(self.micro_losses(phase))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate_factor(progress)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return sum(losses) / len(losses)

    def quick_loss(self) -> float:
        """Return the held-out loss on a small fixed sample (32 windows of 512)."""
        return evaluate.token_losses(self.model, even_windows(self.held_out, 512, 32)).mean().item()

    def run(self) -> None:
        """Train until the budget is used up, then write the model and its facts."""
        if self.options.resume and self.checkpoint.exists():
            self.load()
        last_save = last_export = self.seconds
        mean = None
        while self.progress() < 1:
            started_s = time.perf_counter()
            before = self.tokens
            loss = self.update()
            elapsed_s = time.perf_counter() - started_s
            self.seconds += elapsed_s
            # Average over about 50 steps, because the loss of a single step is too noisy.
            mean = loss if mean is None else 0.98 * mean + 0.02 * loss
            if self.step % 25 == 0:
                rate = (self.tokens - before) / elapsed_s
                logger.info(
                    "%s step %d %.1f%% tokens %d loss %.3f %d tok/s",
                    *(self.name, self.step, 100 * self.progress(), self.tokens, mean, rate),
                )
            if self.seconds - last_save > 60 * self.options.checkpoint_minutes:
                last_save = self.seconds
                self.save()
                logger.info("%s held-out %.4f", self.name, self.quick_loss())
            if self.seconds - last_export > 60 * self.options.export_minutes:
                last_export = self.seconds
                save_model(self.model, MODELS[self.name])
        self.save()
        save_model(self.model, MODELS[self.name])
        record(self.name, self._facts())
        logger.info("%s done: held-out %.4f", self.name, self.quick_loss())

    def _facts(self) -> dict[str, Any]:
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "seed": self.options.seed,
            "steps": self.step,
            "tokens_seen": self.tokens,
            "minutes": round(self.seconds / 60, 1),
            "device": device_name(),
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
        }


def tokenizer_stage(_: argparse.Namespace) -> None:
    """Train the tokenizer and record the corpus."""
    training, held_out = corpus.training_files(), corpus.held_out_files()
    texts, held_texts = corpus.load(training), corpus.load(held_out)
    tokenizer = tokenization.train_tokenizer(texts)
    for folder in MODELS.values():
        tokenization.write(tokenizer, folder)
    counts = {
        part: {
            "files": len(values),
            "characters": sum(map(len, values)),
            "tokens": sum(len(item.ids) + 1 for item in tokenizer.encode_batch_fast(values)),
        }
        for part, values in (("training", texts), ("held_out", held_texts))
    }
    record(
        "corpus",
        {
            "python": platform.python_version(),
            "training_sha256": corpus.fingerprint(training),
            "held_out_sha256": corpus.fingerprint(held_out),
            "held_out_packages": list(corpus.HELD_OUT_PACKAGES),
            "held_out_five_line_runs_also_trained_on": round(
                corpus.shared_lines(texts, held_texts), 5
            ),
            **counts,
        },
    )


def target_stage(options: argparse.Namespace) -> None:
    """Train the target."""
    Run("target", options).run()


def draft_stage(options: argparse.Namespace) -> None:
    """Distil the draft from the target."""
    Run("draft", options).run()


def _loss_facts(model: LlamaForCausalLM, held_out: list[Ids], characters: int) -> dict[str, Any]:
    losses = evaluate.token_losses(model, even_windows(held_out, 2048))
    far = evaluate.token_losses(
        model, even_windows(held_out, tokenization.CONTEXT, POSITION_WINDOWS)
    )
    tokens = sum(map(len, held_out))
    per_token = losses.mean().item()
    return {
        "held_out_nats_per_token": round(per_token, 4),
        "held_out_nats_per_character": round(per_token * tokens / characters, 4),
        "held_out_window": losses.shape[1],
        "held_out_nats_by_position": evaluate.by_position(far),
    }


def evaluate_stage(options: argparse.Namespace) -> None:
    """Measure the written checkpoints in float32 on the held-out files."""
    paths = corpus.held_out_files()
    held_out = documents(paths)
    characters = sum(map(len, corpus.load(paths)))
    models = {name: load_model(folder) for name, folder in MODELS.items()}
    for name, model in models.items():
        record(name, _loss_facts(model, held_out, characters))
    windows = even_windows(held_out, AGREEMENT_LENGTH, AGREEMENT_WINDOWS)
    result = evaluate.agreement(
        models["target"],
        models["draft"],
        windows,
        temperature=COUPLED_TEMPERATURE,
        seed=options.seed,
    )
    facts = {
        "greedy": round(result.greedy, 4),
        "coupled": round(result.coupled, 4),
        "coupled_temperature": COUPLED_TEMPERATURE,
        "positions": result.positions,
        "seed": options.seed,
    }
    record("agreement", facts)
    CARD.write_text(card.render(json.loads(METRICS.read_text())))
    logger.info("agreement %s", facts)


STAGES = {
    "tokenizer": tokenizer_stage,
    "target": target_stage,
    "draft": draft_stage,
    "evaluate": evaluate_stage,
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m training.train", description="Train the demo models."
    )
    parser.add_argument("stage", choices=(*STAGES, "all"))
    parser.add_argument("--minutes", type=float, help="time budget of a model stage")
    parser.add_argument("--tokens", type=int, help="token budget of a model stage")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--checkpoint-minutes", type=float, default=2)
    parser.add_argument("--export-minutes", type=float, default=8, help="interval of model exports")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--log", type=Path, help="log to this file instead of the terminal")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run a stage, or all stages in order."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    WORK.mkdir(exist_ok=True)
    logging.basicConfig(
        level=logging.INFO, filename=options.log, format="%(asctime)s %(message)s", force=True
    )
    torch.set_num_threads(options.threads)
    for name in STAGES if options.stage == "all" else (options.stage,):
        STAGES[name](options)


if __name__ == "__main__":
    main()
