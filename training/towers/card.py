"""The towers' model card, rendered from metrics.json so that its numbers are those of the run."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from training.towers.examples import Example
from training.towers.recipes import ARMS, QUERIES, SHIPPED_ARM
from training.towers.texts import is_validation, licences, stdlib_sources
from training.towers.tokenization import VOCAB_SIZE

_SHAPE: Final = "{layers} x {hidden} ({inner})"

METRICS, CARD = "metrics.json", "MODEL_CARD.md"

_TEMPLATE: Final = """\
# Draftgate towers

The towers are two small BERT-type encoders for retrieval over Python code and documentation.
`draftgate-documents` embeds documents and queries. `draftgate-queries` embeds queries only, in the
same space, for about a fifth of the time. Use them to try and measure retrieval offline. Larger
models with general training, such as E5 or BGE, suit other texts.

| | documents | queries |
| --- | --- | --- |
| parameters | {documents[parameters]:,} | {queries[parameters]:,} |
| layers x width (FFN) | {document_shape} | {query_shape} |
| size of an embedding | {size} | {size} |
| multiply-adds per query | {document_cost[multiply_adds]:,} | {query_cost[multiply_adds]:,} |
| mean time per query (engine, one thread) | {document_cost[mean_us]:.0f} us | \
{query_cost[mean_us]:.0f} us |
| training time (wall) | {documents[minutes]} min | {queries[minutes]} min |

Both use one WordPiece tokenizer with {vocabulary:,} entries, which divides identifiers at
underscores and capitals, and ignores case. They read at most 512 tokens, pool the mean, and have no
prompts. The weights are float16 safetensors in the layout of sentence-transformers. The towers were
trained on {documents[date]} with seed {documents[seed]}, on {documents[device]} (a CPU shared with
other work).

## Retrieval

The collection is that of the `rag` workload: {pairs:,} questions, each with the function or section
that answers it, from modules of the standard library of Python {python} that the towers have not
seen. The table shows the share of questions whose passage is among the first 1, 5 and 20.

| queries by | documents by | recall@1 | recall@5 | recall@20 |
| --- | --- | --- | --- | --- |
{recall}

The query tower keeps {kept[share]:.1%} of the recall@5 of the document tower (95% interval
{kept[low]:.1%} to {kept[high]:.1%}). The standard error of a recall is at most 1.6 points.

## Training texts

{examples:,} pairs of a query and a passage train the towers: {stdlib:,} from the standard library
(PSF licence) and {packaged:,} from installed packages. A tenth as many are left out for validation.

| query | passage | pairs |
| --- | --- | --- |
| first sentence of a docstring, or heading | code, or section | {kinds[summary]:,} |
| next sentence of the docstring | code | {kinds[sentence]:,} |
| first paragraph of a docstring | rest of the docstring | {kinds[detail]:,} |
| words of a function's name | body of the function | {kinds[name]:,} |
| comment | lines after it | {kinds[comment]:,} |

Neither towers nor tokenizer saw the held-out modules: {held_out}. Tests of the standard library are
left out, too, because they name the modules that they test. So are passages of packages that share
five consecutive lines with a held-out module.

| package | version, licence | pairs |
| --- | --- | --- |
{packages}

## Training

Run `python -m training.towers.train all` to train the towers. `training/towers/recipes.py` contains
the recipe and the reasons for its constants. The first phase trains the word embeddings alone, as a
bag of words. The second phase trains all weights. The document tower learns to find the passage of
a query among those of its batch (InfoNCE). The query tower learns the document tower's vectors of
queries, and its order of passages (KL).

The document tower has the weights of step {best[step]:,} of phase `{best[phase]}`, whose loss on
validation is the lowest. After the phase `lexical`, all layers are still the identity, and the
vector of a text is the mean of its word embeddings.

| phase | step | training nats | validation nats | validation recall@5 |
| --- | --- | --- | --- | --- |
{history}

## Limits

The towers know English words that occur in Python projects, and no other language. They match words
more than meaning. The questions of the collection are docstrings, not questions of users.
"""


def collect(examples: Sequence[Example], folder: Path, facts_file: str) -> dict[str, Any]:
    """Return the content of metrics.json, except the measurements of the benchmark.

    Args:
        examples: of training and validation.
        folder: where the stages have written.
    """
    training = [example for example in examples if not is_validation(example.unit)]
    packages = Counter(example.package for example in training if example.package)
    return {
        "documents": json.loads((folder / SHIPPED_ARM / facts_file).read_text()),
        "queries": json.loads((folder / "queries" / facts_file).read_text()),
        "shapes": {
            "documents": asdict(ARMS[SHIPPED_ARM].shape),
            "queries": asdict(QUERIES.shape),
        },
        "corpus": {
            "python": platform.python_version(),
            "examples": len(training),
            "stdlib": len(training) - packages.total(),
            "kinds": dict(Counter(example.kind for example in training)),
            "held_out": sorted({source.unit for source in stdlib_sources(held_out=True)}),
            "packages": {
                name: {"licence": licence, "examples": packages[name]}
                for name, licence in licences().items()
            },
        },
    }


def render(metrics: dict[str, Any]) -> str:
    """Return the card in Markdown.

    Args:
        metrics: the content of metrics.json.
    """
    corpus, retrieval = metrics["corpus"], metrics["retrieval"]
    costs = retrieval["query_cost"]
    return _TEMPLATE.format(
        documents=metrics["documents"],
        queries=metrics["queries"],
        document_shape=_SHAPE.format(**metrics["shapes"]["documents"]),
        query_shape=_SHAPE.format(**metrics["shapes"]["queries"]),
        size=metrics["shapes"]["queries"]["dense"],
        vocabulary=VOCAB_SIZE,
        document_cost=costs["draftgate-documents"],
        query_cost=costs["draftgate-queries"],
        pairs=retrieval["pairs"],
        python=corpus["python"],
        recall="\n".join(_recall_row(row) for row in retrieval["rows"]),
        kept=retrieval["kept_by_queries"],
        examples=corpus["examples"],
        stdlib=corpus["stdlib"],
        packaged=corpus["examples"] - corpus["stdlib"],
        kinds=corpus["kinds"],
        held_out=", ".join(f"`{name}`" for name in corpus["held_out"]),
        packages="\n".join(
            f"| {name} | {facts['licence']} | {facts['examples']:,} |"
            for name, facts in corpus["packages"].items()
        ),
        best=min(metrics["documents"]["history"], key=lambda row: row["validation_nats"]),
        history="\n".join(_history_row(row) for row in metrics["documents"]["history"]),
    )


def write(metrics: dict[str, Any], folder: Path) -> None:
    """Write metrics.json, and the card if the benchmark has measured the towers."""
    (folder / METRICS).write_text(json.dumps(metrics, indent=2) + "\n")
    if "retrieval" in metrics:
        (folder / CARD).write_text(render(metrics))


def _recall_row(row: dict[str, Any]) -> str:
    by = row["queries_by"]
    documents = "draftgate-documents" if by == "draftgate-queries" else by
    shares = " | ".join(f"{share:.1%}" for share in row["recall"].values())
    return f"| {by} | {documents} | {shares} |"


def _history_row(row: dict[str, Any]) -> str:
    losses = f"{row['training_nats']:.3f} | {row['validation_nats']:.3f}"
    return f"| {row['phase']} | {row['step']:,} | {losses} | {row['validation_recall']['5']:.1%} |"
