"""The model card, rendered from metrics.json so that its numbers cannot drift from the run's."""

from __future__ import annotations

from typing import Any

_TEMPLATE = """\
# Draftgate demo models

Two small Llama-layout language models that complete Python source code: a *target* and a *draft*
for speculative decoding. They exist so that the gateway and its engine can be tried, tested and
measured offline with real weights and a real acceptance rate. They are far too small to be useful
as assistants.

| | target | draft |
| --- | --- | --- |
| parameters | {target[parameters]:,} | {draft[parameters]:,} |
| layers x width (FFN) | 6 x 256 (704) | 2 x 128 (352) |
| heads / KV heads x head width | 8 / 4 x 32 | 4 / 2 x 32 |
| tokens seen | {target[tokens_seen]:,} | {draft[tokens_seen]:,} |
| optimiser steps | {target[steps]:,} | {draft[steps]:,} |
| training time (wall) | {target[minutes]} min | {draft[minutes]} min |
| held-out loss, nats per token | {token[target]:.3f} | {token[draft]:.3f} |
| held-out loss, nats per character | {character[target]:.3f} | {character[draft]:.3f} |

Both: byte-level BPE of 4,096 entries ({characters_per_token:.2f} characters a token on the held-out
files), tied embeddings, RoPE (theta 10,000), 8,192 positions, bfloat16 safetensors. Trained on
{target[date]} on {target[device]} (a CPU shared with other work), seed {target[seed]}.

## Agreement of draft and target

Teacher-forced over {agreement[positions]:,} held-out positions (windows of 1,024 tokens):

- greedy (both pick their most likely token): **{greedy:.1f} %**
- coupled at temperature {agreement[coupled_temperature]} (both take argmax(logits / T + g) with the
  same Gumbel noise g): **{coupled:.1f} %**

## Loss by position

Held-out nats per token in windows of 8,192 tokens of packed files. The last columns tell whether
the model still works at long context: the loss should not rise. Where it does, the last stage,
at 8,192 tokens, was too short to teach that context.

| positions | target | draft |
| --- | --- | --- |
{positions}

## Corpus

The `.py` files of the standard library of Python {corpus[python]} (PSF licence), tests included;
without character tables, `pydoc_data`, build-generated files, files that are not UTF-8, and exact
duplicates. Held out entirely, with their tests: {held_out}.
Neither the models nor the tokenizer saw these.

| | files | characters | tokens |
| --- | --- | --- | --- |
| training | {training[files]:,} | {training[characters]:,} | {training[tokens]:,} |
| held out | {held[files]:,} | {held[characters]:,} | {held[tokens]:,} |

{shared:.2f} % of the held-out runs of five consecutive non-blank lines also occur in
the training part (licence headers, common idioms). Windows of
2,048 tokens over all held-out files give the losses in the first table.

- training sha256: `{corpus[training_sha256]}`
- held-out sha256: `{corpus[held_out_sha256]}`

## Training

`python -m training.train all`; the recipe and the reasons for its constants are in
`recipes.py`. Muon for the layers' matrices, AdamW for the rest; windows of 512, then 2,048, then
8,192 tokens; cross-entropy for the target; for the draft nine tenths KL to the target's
distribution and one tenth cross-entropy. A time budget decides where a run ends, so
another machine gives other numbers; `--tokens` fixes the length instead.

## Prompts and chat

Documents begin with `<|endoftext|>`, which is BOS and EOS. The tokenizer does not add it by itself.
The models are **not** trained for chat: the chat template passes the user's text through as code to
go on with, and turns a system message into a `#` comment. `<|user|>`, `<|assistant|>` and `<|end|>`
are reserved and untrained. Prompts that look like the middle of a Python file work best, such as
`def read_lines(path):\\n    with open(path`.

## Limits

The models imitate the standard library's look: names, layout, docstrings and test idioms are mostly
plausible, the logic mostly is not. Do not run what they write. They may repeat themselves and
may reproduce fragments of the standard library.
"""


def render(metrics: dict[str, Any]) -> str:
    """Return the card's Markdown for the facts in metrics.json."""
    corpus, agreement = metrics["corpus"], metrics["agreement"]
    by_position = {name: metrics[name]["held_out_nats_by_position"] for name in ("target", "draft")}
    positions = "\n".join(
        f"| {bucket} | {loss:.3f} | {by_position['draft'][bucket]:.3f} |"
        for bucket, loss in by_position["target"].items()
    )
    held = corpus["held_out"]
    return _TEMPLATE.format(
        **{name: metrics[name] for name in ("target", "draft", "corpus", "agreement")},
        token={name: metrics[name]["held_out_nats_per_token"] for name in by_position},
        character={name: metrics[name]["held_out_nats_per_character"] for name in by_position},
        training=corpus["training"],
        held=held,
        held_out=", ".join(f"`{name}`" for name in corpus["held_out_packages"]),
        shared=100 * corpus["held_out_five_line_runs_also_trained_on"],
        characters_per_token=held["characters"] / held["tokens"],
        greedy=100 * agreement["greedy"],
        coupled=100 * agreement["coupled"],
        positions=positions,
    )
