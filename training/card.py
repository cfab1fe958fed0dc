"""The model card, rendered from metrics.json so that its numbers are those of the run."""

from __future__ import annotations

from typing import Any

_TEMPLATE = """\
# Draftgate demo models

The demo models are two small Llama-layout language models that complete Python source code: a
*target* and a *draft* for speculative decoding. Use them to try, test and measure the gateway and
its engine offline, with real weights and a real acceptance rate. The models are far too small to be
useful as assistants.

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

Both models use byte-level BPE with 4,096 entries ({characters_per_token:.2f} characters per token
on the held-out files), tied embeddings, RoPE (theta 10,000) and 8,192 positions. The weights are
bfloat16 safetensors. The models were trained on {target[date]} with seed {target[seed]}, on
{target[device]} (a CPU shared with other work).

## Agreement of draft and target

The shares are teacher-forced over {agreement[positions]:,} held-out positions, in windows of 1,024
tokens:

- greedy (both pick their most likely token): **{greedy:.1f} %**
- coupled at temperature {agreement[coupled_temperature]} (both take argmax(logits / T + g) with the
  same Gumbel noise g): **{coupled:.1f} %**

## Loss by position

The table shows held-out nats per token in windows of 8,192 tokens of packed files. The last rows
show whether a model still works at long context, where its loss should not rise. A rising loss
means that the last training phase, at 8,192 tokens, was too short to teach that context.

| positions | target | draft |
| --- | --- | --- |
{positions}

## Corpus

The corpus contains the `.py` files of the standard library of Python {corpus[python]} (PSF
licence), including tests. It excludes character tables, `pydoc_data`, build-generated files, files
that are not UTF-8, and exact duplicates. Neither the models nor the tokenizer saw the held-out
packages and their tests: {held_out}.

| | files | characters | tokens |
| --- | --- | --- | --- |
| training | {training[files]:,} | {training[characters]:,} | {training[tokens]:,} |
| held out | {held[files]:,} | {held[characters]:,} | {held[tokens]:,} |

{shared:.2f} % of the held-out runs of five consecutive non-blank lines also occur in the training
part (licence headers, common idioms). The losses in the first table are from windows of 2,048
tokens over all held-out files.

- training sha256: `{corpus[training_sha256]}`
- held-out sha256: `{corpus[held_out_sha256]}`

## Training

Run `python -m training.train all` to train the models. `training/recipes.py` contains the recipe
and the reasons for its constants. Muon trains the layers' matrices, AdamW trains the other
weights. The windows have 512, then 2,048, then 8,192 tokens. The loss of the target is
cross-entropy. The loss of the draft is nine tenths KL to the target's distribution and one tenth
cross-entropy. A time budget ends each run, so the numbers depend on the machine. Use `--tokens` to
fix the length instead.

## Prompts and chat

Documents begin with `<|endoftext|>`, which is BOS and EOS. The tokenizer does not add this token.
The models are **not** trained for chat. The chat template passes the user's text to the model as
code to continue, and turns a system message, functions and their results into `#` comments. Calls
have the format of Hermes, and the models write them only if a grammar forces them. `<|user|>`,
`<|assistant|>` and `<|end|>` are reserved and untrained. Prompts that resemble the middle of a
Python file work best, such as `def read_lines(path):\\n    with open(path`.

## Limits

The models imitate the style of the standard library. Their names, layout, docstrings and test
idioms are mostly plausible, but the logic is mostly wrong. Do not run code from these models.
Their output may contain repetitions and fragments of the standard library.
"""


def render(metrics: dict[str, Any]) -> str:
    """Return the card in Markdown.

    Args:
        metrics: the content of metrics.json.
    """
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
