"""Builds a warm worker from its configuration: weights, memory, exact bits, step costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from draftgate import __version__
from draftgate.backends.checkpoints import (
    SHIPPED_MODEL_ID,
    checkpoint_id,
    find_checkpoint,
)
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.proposer import Proposer
from draftgate.backends.core.run_recorder import RecordedWorkerCore, RunRecorder
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.checkpoint import Checkpoint
from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.engine.device_turns import shared_turns
from draftgate.backends.engine.encoder.config import is_encoder
from draftgate.backends.engine.encoder.load import load_encoder
from draftgate.backends.engine.encoder.sentence import read_prompts
from draftgate.backends.engine.gpu.shapes import ROW_BUCKETS
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, Features, KvPool, num_blocks_for
from draftgate.backends.engine.load_adapters import check_adapters
from draftgate.backends.engine.load_draft import (
    LoadedDraft,
    draft_proposer,
    find_draft,
    load_draft,
    read_tokenizer,
)
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.engine.memory import UnusedMemory, kv_cache_bytes, peak_bytes
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.numerics import (
    check_cpu_isa,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
    fix_sums,
    is_exact,
    numerics_class,
)
from draftgate.backends.engine.pooling import pools_last_token
from draftgate.backends.engine.proposers.registry import (
    ProposerSetup,
    check_proposer_name,
    make_proposers,
    measured_depths,
)
from draftgate.backends.engine.quantisation.packed import Packing, choose_packing
from draftgate.backends.engine.quantisation.reading import loaded_bytes
from draftgate.backends.engine.recording import (
    check_recording,
    open_recording,
    run_recorder,
)
from draftgate.backends.engine.runner import ModelRunner, Runner
from draftgate.backends.engine.sampler import Verify
from draftgate.backends.engine.served import PHASES, ServedModel
from draftgate.backends.engine.startup_cache import (
    AcceptanceCache,
    CacheEntry,
    Measurements,
    save_learned,
    source_hash,
    startup_cache,
)
from draftgate.backends.engine.taps import Taps
from draftgate.backends.engine.warmup import (
    TOKEN_BUCKETS,
    UNPADDED_BUCKETS,
    measure_step_cost,
    rehearse,
    rehearse_tree,
    steps_are_exact,
)
from draftgate.backends.engine.weights import Weights, load_weights
from draftgate.backends.generation_defaults import read_generation_defaults
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.kv_transfer.exchange import KvExchange
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import SAMPLING_OPTIONS, Capabilities, ModelCard, Task
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import batching_policy, speculation_policy

VERIFICATIONS: Final[dict[str, Verify]] = {"coupled": "coupled", "rejection": "rejection"}

LOADED_SHARE, PROBED_SHARE = (end for end, _ in PHASES[:2])
"""Progress after the weights are read, and after the probe for exact bits."""


def load_engine(
    config: WorkerConfig, progress: Callable[[float], None] = lambda _share: None
) -> LoadedEngine:
    """Load, warm up and measure a worker.

    Call this function in the thread that runs the worker's steps.

    Args:
        config: the worker's settings.
        progress: called with the completed share, 0 to 1.

    Raises:
        CheckpointError: the model cannot be loaded.
        ValueError: a setting is invalid, such as `kv_bytes` below the size of a block.
    """
    draft_directory = find_draft(config)
    _check(config, draft_directory)
    device = _prepared_device(config)
    directory = find_checkpoint(config.model)
    if is_encoder(directory):
        engine = _loaded_encoder(config, directory, device, progress)
    else:
        engine = _loaded_decoder(config, directory, draft_directory, device, progress)
    # Workers with different indices share the cores of a CPU (`WorkerConfig.threads`), not turns.
    return replace(engine, turns=shared_turns(f"{device.type}:{config.device_index}"))


def _weight_form(
    config: WorkerConfig, directory: Path, device: str
) -> tuple[torch.dtype, Packing | None]:
    """Return the dtype of a model and the packing of its weights, with the errors of both."""
    dtype = choose_dtype(config.dtype, directory, device, packed=True)
    packing = choose_packing(config.quantization, Checkpoint(directory), device, dtype)
    if packing is None:
        dtype = choose_dtype(config.dtype, directory, device)
    return dtype, packing


def _loaded_decoder(
    config: WorkerConfig,
    directory: Path,
    draft_directory: Path | None,
    device: torch.device,
    progress: Callable[[float], None],
) -> LoadedEngine:
    model = read_model_config(directory)
    tokenizer = read_tokenizer(directory, model)
    dtype, packing = _weight_form(config, directory, device.type)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, directory, dtype, device)
    adapters = check_adapters(config, model, device)
    weights = _weights(config, directory, model, dtype, device, packing, progress)
    longest = model.max_position_embeddings
    max_model_len = min(config.max_model_len or longest, longest)
    decoder, memory = adapters.decoder(weights, max_model_len, exact=config.exact)
    draft = load_draft(config, draft_directory, model, weights, tokenizer, max_model_len)
    checkpoints = [one for one in (directory, draft.directory) if one is not None]
    weight_bytes = sum(loaded_bytes(one, dtype, packing) for one in checkpoints)
    pool = _pool(config, decoder, draft, max_model_len, kv_dtype, weight_bytes)
    limits = config.step_limits(device.type)
    verify = VERIFICATIONS[config.verify]
    runner = runner_for(
        decoder, pool, max_num_seqs=limits.sequences, max_model_len=max_model_len, verify=verify
    )
    max_tokens = min(pool.num_blocks * BLOCK_TOKENS, max_model_len)
    max_sequences = min(pool.num_blocks, limits.sequences)
    made_by = weights.checkpoint_hash, dtype, decoder.arithmetic, device
    numerics = partial(numerics_class, *made_by, kv_dtype=kv_dtype)
    timed = numerics(exact=config.exact), draft.checkpoint_hash, config.draft_window_tokens
    cache = _cache(device, *timed, max_tokens, max_sequences, config.verify)
    found = None if cache is None else cache.read()
    if found is None:
        test = partial(steps_are_exact, runner, model, dtype, kv_dtype, max_tokens, device)
        exact = is_exact(test, dtype, device, required=config.exact, packed=not decoder.is_padded)
        progress(PROBED_SHARE)
        cost = _step_cost(runner, decoder, max_tokens, max_sequences)
    else:
        exact, cost = found.exact, found.cost
        rehearse(runner, min(TOKEN_BUCKETS[0], max_tokens))
    run = run_recorder(config, pool.num_blocks)
    blocks = KvBlocks(pool.num_blocks, BLOCK_TOKENS) if run is None else run.blocks
    depth_cost = None if found is None else found.depth_cost
    parts = decoder, pool, blocks, runner.forward, cost, *draft.models, max_model_len, depth_cost
    proposers = make_proposers(ProposerSetup(config, *parts))
    watched = proposers if run is None else run.watch(proposers)
    scheduler = _scheduler(config, SchedulerConfig(*limits, model.eos_ids), blocks, watched, cost)
    name = numerics(exact=exact)
    card = _card(config, model, directory, name, max_model_len, pool, exact=exact)
    card = replace(adapters.described(card), weight_bytes=weight_bytes)
    if run is None:  # a replay of the run would lack the imported blocks
        card = replace(card, kv_format=pool.format(draft.format_class(name)))
    worker = _worker(scheduler, tokenizer, model, card, run)
    # A replay of the run would lack the counts.
    learned = _learned(config, scheduler, weights, draft) if run is None else None
    depths = partial(measured_depths, proposers)
    learns = partial(save_learned, scheduler, depths, cache, learned, exact=exact)
    learns()
    served, exchange = ServedModel(card, worker.admission), KvExchange(blocks, pool)
    # A replay of the run would lack the expired prefixes.
    unused = UnusedMemory(blocks, pool, expires=run is None) if device.type == "cpu" else None
    recording = open_recording(config, proposers, card, scheduler, run)
    service = adapters.service(worker, memory, dtype, exact=exact)
    return LoadedEngine(
        worker, runner, exchange, served, proposers, learns, recording, unused, adapters=service
    )


def _learned(
    config: WorkerConfig, scheduler: Scheduler, weights: Weights, draft: LoadedDraft
) -> AcceptanceCache | None:
    if not config.acceptance_cache:
        return None
    key = weights.checkpoint_hash, draft.checkpoint_hash, config.verify
    return AcceptanceCache(scheduler.scores, *key)


def _scheduler(
    config: WorkerConfig,
    limits: SchedulerConfig,
    blocks: KvBlocks,
    proposers: Mapping[str, Proposer],
    cost: StepCost,
) -> Scheduler:
    speculation, batching = speculation_policy(config.speculation), batching_policy(config.batching)
    return Scheduler(limits, blocks, speculation, proposers, cost, batching)


def _loaded_encoder(
    config: WorkerConfig, directory: Path, device: torch.device, progress: Callable[[float], None]
) -> LoadedEngine:
    """Load an encoder, which has neither KV blocks nor proposers."""
    if config.loras:
        raise ValueError("--lora needs a model that generates text, not an encoder")
    worker, runner, card = load_encoder(
        config, directory, device, lambda share: progress(LOADED_SHARE * share)
    )
    return LoadedEngine(worker, runner, None, ServedModel(card, worker.admission), {})


def _step_cost(
    runner: ModelRunner, decoder: Decoder, max_tokens: int, max_sequences: int
) -> StepCost:
    buckets = TOKEN_BUCKETS if decoder.is_padded else UNPADDED_BUCKETS
    if decoder.device.type == "cuda":
        buckets = ROW_BUCKETS
        rehearse_tree(runner)
    vocab_size = decoder.config.vocab_size
    return measure_step_cost(runner, max_tokens, max_sequences, buckets, vocab_size=vocab_size)


def _cache(device: torch.device, *key: object) -> CacheEntry[Measurements] | None:
    """Return the cache of a CPU's measurements.

    A GPU has no cache, because the timed steps also warm up the GPU.
    """
    if device.type != "cpu":
        return None
    return startup_cache(__version__, source_hash(), *key)


def _weights(
    config: WorkerConfig,
    directory: Path,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    packing: Packing | None,
    progress: Callable[[float], None],
) -> Weights:
    def read(share: float) -> None:
        progress(LOADED_SHARE * share)

    return load_weights(
        directory, model, dtype, device=device, exact=config.exact, packing=packing, progress=read
    )


def _check(config: WorkerConfig, draft_directory: Path | None) -> None:
    if config.verify not in VERIFICATIONS:
        known = ", ".join(VERIFICATIONS)
        raise ValueError(f"unknown verification {config.verify!r}; known: {known}")
    check_proposer_name(config.proposer, draft_proposer(draft_directory))
    check_recording(config)


def _prepared_device(config: WorkerConfig) -> torch.device:
    """Return the device after applying all settings that must precede its first use.

    Raises:
        ValueError: this machine lacks the device or the requested instruction set.
    """
    check_cpu_isa()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device, config.device_index)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if config.exact:
            fix_sums()
    return device


def runner_for(
    decoder: Decoder,
    pool: KvPool,
    *,
    max_num_seqs: int,
    max_model_len: int,
    verify: Verify = "coupled",
    captured: bool = True,
) -> ModelRunner:
    """Return the runner of the decoder's device.

    Args:
        max_num_seqs: maximum sequences of a step.
        max_model_len: maximum tokens of a context.
        captured: whether to capture a GPU's steps as CUDA graphs.
    """
    if decoder.device.type != "cuda":
        return Runner(decoder, pool, verify)
    # Some machines lack Triton.
    from draftgate.backends.engine.gpu.runner import gpu_runner

    runner = gpu_runner(
        decoder, pool, max_num_seqs=max_num_seqs, max_model_len=max_model_len, verify=verify
    )
    if captured:
        runner.capture()
    return runner


def _pool(
    config: WorkerConfig,
    decoder: Decoder,
    draft: LoadedDraft,
    max_model_len: int,
    kv_dtype: torch.dtype,
    weight_bytes: int,
) -> KvPool:
    """Allocate the KV memory of a model, and connect its head to the memory if it has one."""
    head, model = draft.head, decoder.config
    features = None if head is None else head.features
    num_blocks = _num_blocks(config, decoder, max_model_len, kv_dtype, weight_bytes, features)
    pool = KvPool(model, num_blocks, kv_dtype, decoder.device, features)
    if head is not None:
        decoder.taps = Taps(head.config.taps_of(model), head.fuse, pool)
    return pool


def _num_blocks(
    config: WorkerConfig,
    decoder: Decoder,
    max_model_len: int,
    kv_dtype: torch.dtype,
    weight_bytes: int,
    features: Features | None,
) -> int:
    """Return the number of KV blocks to allocate, after weights of `weight_bytes` are loaded.

    Raises:
        ValueError: the memory is smaller than a block.
    """
    step_bytes = _largest_step_bytes(config, decoder, max_model_len, kv_dtype)
    kv_bytes = kv_cache_bytes(decoder.device, config, weight_bytes, step_bytes)
    # More blocks than all sequences use at full length would stay empty.
    sequences = config.step_limits(decoder.device.type).sequences
    most = sequences * -(-max_model_len // BLOCK_TOKENS)
    return min(num_blocks_for(decoder.config, kv_bytes, kv_dtype, features), most)


def _largest_step_bytes(
    config: WorkerConfig, decoder: Decoder, max_model_len: int, kv_dtype: torch.dtype
) -> int:
    """Return the peak memory of the largest step on a GPU, in bytes.

    The result is 0 on a CPU, whose KV cache takes only a share of the available memory, and if the
    configuration sets the memory of the KV cache.
    """
    if decoder.device.type != "cuda" or config.kv_bytes is not None:
        return 0
    limits = config.step_limits(decoder.device.type)
    tokens = min(limits.tokens, max_model_len)
    pool = KvPool(decoder.config, -(-tokens // BLOCK_TOKENS), kv_dtype, decoder.device)
    runner = runner_for(
        decoder,
        pool,
        max_num_seqs=limits.sequences,
        max_model_len=max_model_len,
        captured=False,
    )
    return peak_bytes(decoder.device, partial(rehearse, runner, tokens))


def _worker(
    scheduler: Scheduler,
    tokenizer: Tokenizer,
    model: ModelConfig,
    card: ModelCard,
    run: RunRecorder | None,
) -> WorkerCore:
    grammars, able = LlGrammars(tokenizer, model.eos_ids), card.capabilities
    make = WorkerCore if run is None else partial(RecordedWorkerCore, run=run)
    return make(
        scheduler,
        tokenizer,
        card.max_model_len,
        grammars,
        tasks=able.tasks,
        adapters=able.adapters,
    )


def _embedding_size(model: ModelConfig, directory: Path) -> int:
    """Return the size of an embedding, or 0 for an unsupported pooling."""
    return model.hidden_size if pools_last_token(directory) else 0


def _card(
    config: WorkerConfig,
    model: ModelConfig,
    directory: Path,
    numerics: str,
    max_model_len: int,
    pool: KvPool,
    *,
    exact: bool,
) -> ModelCard:
    embedding_size = _embedding_size(model, directory)
    capabilities = Capabilities(
        exact=exact and config.verify == "coupled",  # with rejection, a text depends on its drafts
        tasks=(Task.GENERATE, Task.EMBED) if embedding_size else (Task.GENERATE,),
        embedding_size=embedding_size,
        formats=True,
        options=SAMPLING_OPTIONS,
    )
    return ModelCard(
        config.model_id or checkpoint_id(config.model),
        config.model or SHIPPED_MODEL_ID,
        max_model_len,
        numerics,
        int(time.time()),
        capabilities,
        pool.num_blocks * BLOCK_TOKENS,
        tuple(sorted(model.eos_ids)),
        prompts=read_prompts(directory),
        defaults=read_generation_defaults(config.generation_config, directory),
        kv_bytes=pool.memory.nbytes,
    )
