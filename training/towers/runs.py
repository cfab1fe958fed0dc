"""The training of a document tower, and the distillation of a query tower from it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.towers.data import MOST_PASSAGE_TOKENS, Batches, EncodedExample, Ids
from training.towers.losses import MOST_SCALE, contrastive, distillation
from training.towers.model import Tower, embed
from training.towers.recipes import QueryRecipe, Recipe
from training.towers.retrieval import recall
from training.train import CLIP

WARMUP: Final = 0.05
"""Share of a phase over which the rate rises to its peak. It then falls to zero, linearly."""

INITIAL_SCALE: Final = 20.0
"""Initial factor of the cosines: a temperature of 0.05, which is usual."""

LOG_TIMES: Final = 8
"""Validations of each phase."""

LEXICAL, ALL = "lexical", "all"
"""The phases: the first one trains word embeddings as if there were no layers."""

logger = logging.getLogger("towers")


class Phase:
    """A phase of training with its optimisers and their rates."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], steps: int) -> None:
        self.optimizers = optimizers
        self.steps = steps
        self.step = 0
        self.loss: float | None = None
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["peak"] = group["lr"]

    def update(self, loss: Tensor) -> None:
        """Take a step along the gradient of a loss."""
        loss.backward()
        factor = min((self.step + 1) / (WARMUP * self.steps), 1.0 - self.step / self.steps, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
                nn.utils.clip_grad_norm_(group["params"], CLIP)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        # Average over about 20 steps, because the loss of a single step is too noisy.
        value = loss.item()
        self.loss = value if self.loss is None else 0.95 * self.loss + 0.05 * value

    @property
    def reports(self) -> bool:
        """Whether to validate after this step."""
        return self.step % max(1, self.steps // LOG_TIMES) == 0 or self.step == self.steps


def lexical_optimizers(
    tower: Tower, others: Iterable[Tensor], rate: float
) -> list[torch.optim.Optimizer]:
    """Return AdamW for the word embeddings, and with a third of the rate for other weights."""
    words, *rest = tower.lexical_parameters()
    groups: list[dict[str, Any]] = [
        {"params": [words]},
        {"params": [*rest, *others], "lr": rate / 3},
    ]
    return [torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)]


def all_optimizers(
    tower: Tower, others: Iterable[Tensor], matrix_rate: float, other_rate: float
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for the other weights."""
    matrices = [p for p in tower.bert.encoder.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in tower.parameters() if id(p) not in chosen and p.requires_grad]
    return [
        torch.optim.Muon(
            matrices, lr=matrix_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([*rest, *others], lr=other_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


class DocumentRun:
    """The training of a document tower, which also embeds the queries of its training.

    The result has the weights of the validation with the lowest loss.

    Attributes:
        history: losses and recall of each validation.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        training: Sequence[EncodedExample],
        validation: Sequence[EncodedExample],
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self.recipe = recipe
        self.tower = Tower(recipe.shape, tokenizer.get_vocab_size())
        self.log_scale = nn.Parameter(torch.tensor(INITIAL_SCALE).log())
        self.history: list[dict[str, Any]] = []
        self._batches = Batches(training, recipe.kind_weights, seed)
        self._best = self.tower.state_dict()
        self._validation = validation

    @property
    def scale(self) -> float:
        """The learned factor of the cosines."""
        return min(self.log_scale.exp().item(), MOST_SCALE)

    def run(self) -> None:
        """Train both phases."""
        recipe, scale = self.recipe, [self.log_scale]
        rates = lexical_optimizers(self.tower, scale, recipe.lexical_rate)
        self._train(LEXICAL, Phase(rates, recipe.lexical_steps), recipe.lexical_batch)
        rates = all_optimizers(self.tower, scale, recipe.matrix_rate, recipe.other_rate)
        self._train(ALL, Phase(rates, recipe.steps), recipe.batch)
        self.tower.load_state_dict(self._best)

    def _train(self, name: str, phase: Phase, batch: int) -> None:
        encode = self.tower.lexical if name == LEXICAL else self.tower
        self.tower.train()
        while phase.step < phase.steps:
            queries, passages = self._batches.draw(batch)
            query, passage = encode([*queries, *passages]).split(len(queries))
            phase.update(contrastive(query, passage, self.log_scale))
            if phase.reports:
                self._validate(name, phase, encode)
        self.tower.eval()

    @torch.no_grad()
    def _validate(self, name: str, phase: Phase, encode: Callable[[Sequence[Ids]], Tensor]) -> None:
        query = encode([example.query for example in self._validation])
        passage = encode([example.passage for example in self._validation])
        facts = {
            "phase": name,
            "step": phase.step,
            "training_nats": round(phase.loss or 0.0, 4),
            "validation_nats": round(contrastive(query, passage, self.log_scale).item(), 4),
            "validation_recall": recall(query @ passage.T),
        }
        # The layers begin to fit the training pairs only, so the best weights may be earlier ones.
        if all(facts["validation_nats"] < earlier["validation_nats"] for earlier in self.history):
            self._best = copy.deepcopy(self.tower.state_dict())
        self.history.append(facts)
        logger.info("scale %.1f, %s", self.scale, facts)


class QueryRun:
    """The distillation of a query tower, whose queries should be near those of the large one."""

    def __init__(
        self,
        recipe: QueryRecipe,
        teacher: Tower,
        scale: float,
        tokenizer: Tokenizer,
        training: Sequence[EncodedExample],
        validation: Sequence[EncodedExample],
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self.recipe = recipe
        self.tower = Tower(recipe.shape, tokenizer.get_vocab_size())
        self.history: list[dict[str, Any]] = []
        self._scale = scale
        self._rng = Random(seed)
        chosen = [example for example in training if recipe.kind_weights[example.kind]]
        self._queries = [example.query for example in chosen]
        self._weights = [recipe.kind_weights[example.kind] for example in chosen]
        self._wanted = embed(teacher, self._queries)
        drawn = self._rng.sample(chosen, min(recipe.passages, len(chosen)))
        self._passages = embed(
            teacher, [example.passage[:MOST_PASSAGE_TOKENS] for example in drawn]
        )
        self._validation = [example.query for example in validation]
        self._validation_passages = embed(teacher, [example.passage for example in validation])
        self._validation_wanted = embed(teacher, self._validation)

    def run(self) -> None:
        """Train both phases."""
        recipe = self.recipe
        rates = lexical_optimizers(self.tower, [], recipe.lexical_rate)
        self._train(LEXICAL, Phase(rates, recipe.lexical_steps), recipe.lexical_batch)
        rates = all_optimizers(self.tower, [], recipe.matrix_rate, recipe.other_rate)
        self._train(ALL, Phase(rates, recipe.steps), recipe.batch)

    def _train(self, name: str, phase: Phase, batch: int) -> None:
        encode = self.tower.lexical if name == LEXICAL else self.tower
        self.tower.train()
        while phase.step < phase.steps:
            drawn = self._rng.choices(range(len(self._queries)), self._weights, k=batch)
            beside = self._rng.choices(range(len(self._passages)), k=batch)
            student = encode([self._queries[index] for index in drawn])
            phase.update(
                distillation(student, self._wanted[drawn], self._passages[beside], self._scale)
            )
            if phase.reports:
                self._validate(name, phase, encode)
        self.tower.eval()

    @torch.no_grad()
    def _validate(self, name: str, phase: Phase, encode: Callable[[Sequence[Ids]], Tensor]) -> None:
        found = encode(self._validation)
        facts = {
            "phase": name,
            "step": phase.step,
            "training_loss": round(phase.loss or 0.0, 4),
            "validation_cosine": round((found * self._validation_wanted).sum(-1).mean().item(), 4),
            "validation_recall": recall(found @ self._validation_passages.T),
            "teacher_recall": recall(self._validation_wanted @ self._validation_passages.T),
        }
        self.history.append(facts)
        logger.info("%s", facts)
