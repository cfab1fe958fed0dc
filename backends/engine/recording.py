"""The recording of a serving worker: `--record-acceptance`.

The worker's thread records drafts and encodes each finished text. If every request is recorded, the
file also contains the run: the calls of the scheduler and what its decisions read. Another thread
writes the file, so that the disk never delays a step.
"""

from __future__ import annotations

import gzip
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import UNSET, structs

from draftgate import __version__
from draftgate.backends.core.draft_recorder import DraftRecorder
from draftgate.backends.core.proposer import Proposer
from draftgate.backends.core.recorded_blocks import RecordedKvBlocks
from draftgate.backends.core.run_recorder import RunRecorder
from draftgate.backends.core.scheduler import Scheduler
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.recorded_run import RecordedCost, RecordedWorker
from draftgate.backends.recording import SLOTS, RecordingFile, Text, read_recording
from draftgate.backends.types import Delta, GenerationRequest, ModelCard
from draftgate.backends.worker_config import WorkerConfig

log = logging.getLogger(__name__)

SAVE_S: Final = 30.0
"""Seconds between writes, which bounds the loss of a process that is killed. A write of 64 MiB, the
default maximum, takes 0.4 s (a busy AMD EPYC, 2026-11-22)."""

LOOKUP: Final = "ngram"
"""The proposer that is always recorded."""

GAP_BYTES: Final = 256
"""Reserve for the sentence that says why the run cannot be replayed."""

READS_KV: Final = frozenset({"sparse_self", "eagle"})
"""Proposers that read the memory of the target, which the recorder's copies do not have."""


class AcceptanceRecording:
    """Records the drafts of a worker's requests to a file. `save` and `close` are thread-safe."""

    def __init__(
        self,
        path: Path,
        head: RecordingFile,
        max_bytes: int,
        recorder: DraftRecorder,
        run: RunRecorder,
        kept: list[bytes],
    ) -> None:
        """Start the thread that writes the file.

        Args:
            head: the recording without texts and calls.
            max_bytes: maximum size of the file before compression.
            recorder: records the drafts.
            run: records the calls of the worker.
            kept: encoded texts that the file already has.
        """
        self._path = path
        self._head = head
        self._recorder: DraftRecorder | None = recorder
        self._run = run
        self._texts = dict(enumerate(kept))  # encoded, by index
        self._calls: list[bytes] = []  # encoded
        self._bytes = sum(map(len, head.lines(kept))) + GAP_BYTES
        self._call_bytes = 0  # part of these bytes
        self._max_bytes = max_bytes
        self._saved = len(kept)
        self._saving = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._save_regularly, name="draftgate-recording", daemon=True
        )
        self._thread.start()

    def begin(self, request: GenerationRequest) -> None:
        """Record a new request if it is sampled."""
        if self._recorder is not None:
            self._recorder.begin(request)

    def cancel(self, request_id: str) -> None:
        """Drop the record of a cancelled request, unless a replay of the run needs it."""
        if self._recorder is not None:
            texts = self._recorder.cancel(request_id)
            self._keep([] if self._run.gap else texts)

    def observe(self, deltas: list[tuple[str, Delta]]) -> None:
        """Record the positions of a step's tokens."""
        if self._recorder is not None:
            self._keep(self._recorder.observe(deltas))

    def save(self) -> None:
        """Replace the file by one with all texts so far, and log an error instead of raising it."""
        with self._saving:
            # Requests end in an order that depends on their drafts, so sort them by their arrival.
            texts = [encoded for _, encoded in sorted(self._texts.copy().items())]
            if len(texts) == self._saved:
                return
            head, calls = self._head, self._calls.copy()
            if self._run.gap:
                head, calls = structs.replace(head, worker=UNSET, gap=self._run.gap), []
            written = self._path.with_name(self._path.name + ".tmp")
            try:
                # Written line by line, because joining the lines would stop the worker's thread.
                opener = gzip.open if self._path.suffix == ".gz" else open
                with opener(written, "wb") as file:
                    file.writelines(head.lines(texts, calls))
                written.replace(self._path)
            except OSError as error:
                log.warning("cannot write the recording %s: %s", self._path, error)
            else:
                self._saved = len(texts)

    def close(self) -> None:
        """Write the file, with the texts of open requests if a replay needs them."""
        if self._recorder is not None and not self._run.gap:
            self._run.end_all()
            self._keep(self._recorder.cancel_all())
        self._closed.set()
        self._thread.join()
        self.save()

    def _keep(self, texts: list[Text]) -> None:
        """Add texts and the calls since the last time, as far as they fit into the file."""
        calls = self._run.take_calls()
        call_bytes = sum(len(call) + len(",\n") for call in calls)
        self._calls += calls
        self._call_bytes += call_bytes
        self._bytes += call_bytes
        if self._run.gap and self._calls:
            self._drop_calls()
        encoded = {text.prompt: msgspec.json.encode(text) for text in texts}
        self._bytes += sum(len(one) + len(",\n") for one in encoded.values())
        self._texts |= encoded
        if self._bytes > self._max_bytes:
            self._stop_at_limit(encoded)

    def _drop_calls(self) -> None:
        self._bytes -= self._call_bytes
        self._call_bytes = 0
        self._calls = []

    def _stop_at_limit(self, latest: Iterable[int]) -> None:
        """Stop recording without the calls, and drop the latest texts if they do not fit."""
        self._recorder = None
        self._run.stop("the file reached --record-acceptance-bytes")
        self._drop_calls()
        for index in latest:
            if self._bytes > self._max_bytes:
                self._bytes -= len(self._texts.pop(index)) + len(",\n")
        log.warning(
            "the recording %s has reached %d bytes and stops; see --record-acceptance-bytes",
            self._path,
            self._max_bytes,
        )

    def _save_regularly(self) -> None:
        while not self._closed.wait(SAVE_S):
            self.save()


def check_recording(config: WorkerConfig) -> None:
    """Check the settings of the recording, if the worker makes one.

    Raises:
        ValueError: the text or the drafts would depend on other drafts or requests, a proposer
            cannot be recorded, or the directory of the file is not writable.
    """
    if config.record_acceptance is None:
        return
    if config.verify == "rejection":
        raise ValueError(
            "--record-acceptance needs --verify coupled, because the text of --verify rejection "
            "depends on the drafts"
        )
    for name in READS_KV.intersection(config.record_acceptance_proposers):
        raise ValueError(
            f"--record-acceptance-proposers: {name} reads the KV cache, so it cannot be recorded "
            "while serving"
        )
    directory = Path(config.record_acceptance).parent
    if not os.access(directory, os.W_OK):
        raise ValueError(f"--record-acceptance: cannot write to the directory {directory}")


def run_recorder(config: WorkerConfig, num_blocks: int) -> RunRecorder | None:
    """Return the recorder of a worker's run, or None without `record_acceptance`."""
    if config.record_acceptance is None:
        return None
    blocks = RecordedKvBlocks(num_blocks, BLOCK_TOKENS)
    run = RunRecorder(blocks, (LOOKUP, *config.record_acceptance_proposers))
    share = config.record_acceptance_share
    if share < 1.0:
        run.stop(f"--record-acceptance-share is {share:g}, and a replay needs every request")
    return run


def open_recording(
    config: WorkerConfig,
    proposers: Mapping[str, Proposer],
    card: ModelCard,
    scheduler: Scheduler,
    run: RunRecorder | None,
) -> AcceptanceRecording | None:
    """Return the recording of a worker, or None without `record_acceptance`.

    The texts of an earlier run are kept, but not its calls. Several workers of a node write a file
    each, and the index of the device precedes the suffixes of its name.

    Args:
        proposers: proposers of the worker, which record no predictions.
        run: records the calls of the scheduler.

    Raises:
        ValueError: a proposer is not available, or the file is not a recording of this worker.
    """
    if config.record_acceptance is None or run is None:
        return None
    for name in config.record_acceptance_proposers:
        if name != LOOKUP and name not in proposers:
            known = ", ".join(sorted({LOOKUP, *proposers} - READS_KV))
            raise ValueError(f"--record-acceptance-proposers: no proposer {name!r}; known: {known}")
    chosen = {
        name: proposers[name] for name in config.record_acceptance_proposers if name != LOOKUP
    }
    path = Path(config.record_acceptance)
    if config.num_workers > 1:
        stem, dot, suffixes = path.name.partition(".")
        path = path.with_name(f"{stem}-{config.device_index}{dot}{suffixes}")
    source = f"draftgate {__version__} serve; model: {card.root}; numerics: {card.numerics_class}"
    kept = _read_texts(path, source)
    recorder = DraftRecorder(
        {LOOKUP: NgramProposer()} | chosen,
        config.record_acceptance_share,
        tenants=config.record_acceptance_tenants,
        first_index=len(kept),
    )
    worker = RecordedWorker(
        config.speculation,
        config.batching,
        tuple(proposers),
        run.computing,
        scheduler.config.max_num_seqs,
        scheduler.config.max_step_tokens,
        scheduler.blocks.num_blocks,
        scheduler.blocks.block_size,
        RecordedCost.from_cost(scheduler.cost),
        first_text=len(kept),
    )
    head = RecordingFile(
        format="acceptance/2",
        source=source,
        slots=SLOTS,
        worker=UNSET if run.gap else worker,
        texts=(),
    )
    return AcceptanceRecording(path, head, config.record_acceptance_bytes, recorder, run, kept)


def _read_texts(path: Path, source: str) -> list[bytes]:
    """Return the encoded texts of an earlier recording, or none without a file."""
    try:
        file = read_recording(path)
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"--record-acceptance: {error}") from error
    if file.source != source:
        raise ValueError(
            f"--record-acceptance: {path} was recorded by another worker ({file.source}), not by "
            f"this one ({source}); choose another file"
        )
    texts = [structs.replace(text, prompt=at) for at, text in enumerate(file.texts)]
    return [msgspec.json.encode(text) for text in texts]
