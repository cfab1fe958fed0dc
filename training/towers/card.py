"""The query tower's model card, rendered from metrics.json."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from draftgate.backends.checkpoints import SHIPPED_QUERIES_ID
from draftgate.backends.model_store.known_models import DOCUMENT_TOWER
from training.towers.queries import Query
from training.towers.texts import HELD_OUT_PACKAGES, licences, stdlib_sources

METRICS, CARD = "metrics.json", "MODEL_CARD.md"

_TEMPLATE: Final = """\
# Draftgate query tower

`draftgate-queries` embeds queries in the space of MiniLM (`all-MiniLM-L6-v2`, Apache-2.0), for less
time. Index documents with `minilm`, which `draftgate pull minilm` downloads, and send queries to
either model. The tower is distilled from MiniLM with queries about Python code, so use MiniLM for
queries about other subjects.

| | `minilm` | `draftgate-queries` |
| --- | --- | --- |
| parameters | {large[parameters]:,} | {small[parameters]:,} |
| layers x width (FFN) | {large[layers]} x {large[hidden_size]} ({large[intermediate_size]}) | \
{small[layers]} x {small[hidden_size]} ({small[intermediate_size]}) |
| size of an embedding | {run[size]} | {run[size]} |
| mean tokens per query | {large_cost[query_tokens]} | {small_cost[query_tokens]} |
| mean CPU time per query (engine, one thread) | {large_cost[mean_us]:.0f} us | \
{small_cost[mean_us]:.0f} us |

The tokenizer has the {run[words]:,} entries of MiniLM's WordPiece that the training queries use
most. The tower reads at most {run[max_tokens]} tokens, pools the mean, and has no prompts. The
weights are float16 safetensors in the layout of sentence-transformers. The tower was trained on
{run[date]} with seed {run[seed]}, on {run[device]} (a CPU shared with other work).

## Retrieval

The tables show the share of questions whose passage is among the first 1, 5 and 20, with 95%
intervals (bootstrap over the questions). `minilm` embeds the passages. The device was
{retrieval[device]}, on {retrieval[date]}.
{collections}
## Training

Run `python -m training.towers.train all` to train the tower. The queries are {count:,} first
sentences of docstrings, {stdlib:,} from the standard library of Python {python} (PSF licence) and
{packaged:,} from installed packages. MiniLM embeds them. The first word vectors are those of a
ridge regression, whose means are nearest to the vectors of MiniLM. All weights are then trained by
the squared error and the cosine to these vectors, in {run[cpu_minutes]} minutes of CPU time
({run[wall_minutes]} minutes of wall time).

| step | training loss | validation cosine | validation recall@5 | of MiniLM |
| --- | --- | --- | --- | --- |
{history}

The tower saw no query that occurs in a held-out module of the standard library ({held_out}) or in a
held-out package ({held_out_packages}).

| package | version, licence | queries |
| --- | --- | --- |
{packages}

## Limits

The tower knows English words that occur in Python projects, and no other language. The questions of
the measurements are docstrings, not questions of users.
"""

_COLLECTION: Final = """
{name}: {pairs:,} questions

| queries by | recall@1 | recall@5 | recall@20 |
| --- | --- | --- | --- |
{rows}

The query tower keeps {kept} of MiniLM's recall@5. Its recall@5 is {ratio} of that of BM25.
"""


def corpus_facts(queries: Sequence[Query]) -> dict[str, Any]:
    """Return what the tower was trained on."""
    packages = Counter(query.package for query in queries if query.package)
    return {
        "python": platform.python_version(),
        "queries": len(queries),
        "stdlib": len(queries) - packages.total(),
        "held_out": sorted({source.unit for source in stdlib_sources(held_out=True)}),
        "held_out_packages": list(HELD_OUT_PACKAGES),
        "packages": {
            name: {"licence": licence, "queries": packages[name]}
            for name, licence in licences().items()
        },
    }


def render(metrics: dict[str, Any]) -> str:
    """Return the card in Markdown.

    Args:
        metrics: the content of metrics.json.
    """
    run, corpus, retrieval = metrics["run"], metrics["corpus"], metrics["retrieval"]
    collections = retrieval["collections"].items()
    return _TEMPLATE.format(
        run=run,
        retrieval=retrieval,
        large=retrieval["models"][DOCUMENT_TOWER],
        small=retrieval["models"][SHIPPED_QUERIES_ID],
        large_cost=retrieval["query_cost"][DOCUMENT_TOWER],
        small_cost=retrieval["query_cost"][SHIPPED_QUERIES_ID],
        collections="".join(_collection(name, found) for name, found in collections),
        python=corpus["python"],
        count=corpus["queries"],
        stdlib=corpus["stdlib"],
        packaged=corpus["queries"] - corpus["stdlib"],
        history="\n".join(map(_history_row, run["history"])),
        held_out=", ".join(f"`{name}`" for name in corpus["held_out"]),
        held_out_packages=", ".join(corpus["held_out_packages"]),
        packages="\n".join(
            f"| {name} | {facts['licence']} | {facts['queries']:,} |"
            for name, facts in corpus["packages"].items()
        ),
    )


def write(metrics: dict[str, Any], folder: Path) -> None:
    """Write metrics.json, and the card if the benchmark has measured the tower."""
    (folder / METRICS).write_text(json.dumps(metrics, indent=2) + "\n")
    if "retrieval" in metrics:
        (folder / CARD).write_text(render(metrics))


def _collection(name: str, found: dict[str, Any]) -> str:
    return _COLLECTION.format(
        name=name[0].upper() + name[1:],
        pairs=found["pairs"],
        rows="\n".join(
            f"| {by} | {' | '.join(map(_share, recall.values()))} |"
            for by, recall in found["recall"].items()
        ),
        kept=_share(found["kept_by_queries"]),
        ratio=_share(found["queries_over_bm25"]),
    )


def _share(found: dict[str, float]) -> str:
    return f"{found['share']:.1%} ({found['low']:.1%} to {found['high']:.1%})"


def _history_row(row: dict[str, Any]) -> str:
    loss = "" if row["training_loss"] is None else f"{row['training_loss']:.4f}"
    recalls = (row["validation_recall_at_5"], row["teacher_recall_at_5"])
    shares = " | ".join(f"{share:.1%}" for share in recalls)
    return f"| {row['step']:,} | {loss} | {row['validation_cosine']:.3f} | {shares} |"
