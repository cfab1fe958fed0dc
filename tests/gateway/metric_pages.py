"""Metrics pages of inference engines with values that a test chooses.

The page of llama.cpp is a copy from its server (`llama-cpp-python` 0.3.36). The pages of vLLM and
SGLang follow the sources that `backends.openai.metrics` names. Each page also contains other
metrics, so a parser cannot find a metric by its position.
"""

from __future__ import annotations


def vllm(
    running: int = 0,
    waiting: int = 0,
    usage: float = 0.0,
    *,
    blocks: str = "1000",
    usage_name: str = "kv_cache_usage_perc",
    drafts: tuple[int, int, int] | None = None,
    engines: int = 1,
) -> str:
    """Return a page of vLLM in which every data-parallel engine reports the same values."""
    of = 'model_name="m"'
    lines = ["# HELP vllm:num_requests_running Number of requests in model execution batches."]
    for engine in range(engines):
        own = f'{{engine="{engine}",{of}}}'
        lines += [
            f"vllm:num_requests_running{own} {float(running)}",
            f"vllm:num_requests_waiting{own} {float(waiting)}",
            f'vllm:num_requests_waiting_by_reason{{engine="{engine}",reason="x"}} 77.0',
            f"vllm:{usage_name}{own} {usage}",
            f'vllm:time_to_first_token_seconds_bucket{{le="+Inf",engine="{engine}",{of}}} 3.0',
            f'vllm:cache_config_info{own[:-1]},block_size="32",num_gpu_blocks="{blocks}"}} 1.0',
        ]
        for name, count in zip(
            ("drafts", "draft_tokens", "accepted_tokens"), drafts or (), strict=False
        ):
            lines += [
                f"vllm:spec_decode_num_{name}_total{own} {float(count)}",
                f"vllm:spec_decode_num_{name}_created{own} 1.7e+09",
            ]
    return "\n".join(lines) + "\n"


def sglang(
    running: int = 0,
    waiting: int = 0,
    usage: float = 0.0,
    *,
    tokens: int = 4096,
    accept_length: float = 0.0,
    draft_tokens: int = 0,
    accept_rate: float = 0.0,
    max_sequences: int = 0,
) -> str:
    """Return a page of SGLang with two ranks of one replica and metrics per priority."""
    lines = []
    for rank in (0, 1):
        of = f'model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="{rank}"'
        lines += [
            f'sglang:num_running_reqs{{{of},priority=""}} {float(running)}',
            f'sglang:num_running_reqs{{{of},priority="5"}} {float(running)}',
            f"sglang:num_queue_reqs{{{of}}} {float(waiting)}",
            f"sglang:token_usage{{{of}}} {usage}",
            f"sglang:fwd_occupancy{{{of}}} NaN",
            f"sglang:max_total_num_tokens{{{of}}} {float(tokens)}",
            f"sglang:spec_accept_length{{{of}}} {accept_length}",
            f"sglang:spec_accept_rate{{{of}}} {accept_rate}",
            f"sglang:spec_num_draft_tokens{{{of}}} {float(draft_tokens)}",
        ]
        if max_sequences:
            lines.append(f'sglang:max_running_requests{{cap_source="user"}} {float(max_sequences)}')
    return "\n".join(lines) + "\n"


def llama_cpp(
    processing: int = 0, deferred: int = 0, drafts: tuple[int, int, int] = (0, 0, 0)
) -> str:
    """Return a page of llama.cpp's server."""
    verified, drafted, accepted = drafts
    return f"""\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 8
# HELP llamacpp:n_decode_total Total number of llama_decode() calls
# TYPE llamacpp:n_decode_total counter
llamacpp:n_decode_total 12
# HELP llamacpp:spec_decode_num_draft_tokens_total Speculative: Total draft tokens generated
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total {drafted}
# HELP llamacpp:spec_decode_num_accepted_tokens_total Speculative: Total draft tokens accepted
# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter
llamacpp:spec_decode_num_accepted_tokens_total {accepted}
# HELP llamacpp:spec_decode_num_drafts_total Speculative: Total verification steps
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total {verified}
# HELP llamacpp:requests_processing Number of requests processing
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing {processing}
# HELP llamacpp:requests_deferred Number of requests deferred
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred {deferred}
# HELP llamacpp:n_busy_slots_per_decode Average number of busy slots per llama_decode() call
# TYPE llamacpp:n_busy_slots_per_decode gauge
llamacpp:n_busy_slots_per_decode 1.25
"""
