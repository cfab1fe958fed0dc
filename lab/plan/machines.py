"""The machines that `draftgate plan` may rent, and their simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Final

from msgspec import structs

from draftgate.backends.recording import SLOTS, Guess, Text
from draftgate.backends.sim.engine_costs import ENGINES
from draftgate.backends.sim.profile import DraftCost, Profile, load_profile
from draftgate.backends.worker_config import WorkerConfig
from draftgate.lab.plan.sources import Requests
from draftgate.lab.planning.bounds import MeanLengths, RateBounds, bounds
from draftgate.lab.planning.forecast import Forecast
from draftgate.lab.planning.throughput import DraftPoint, Machine, Targets
from draftgate.lab.sim.environment import SimEnvironment
from draftgate.lab.sim.recording import Recording, load_recording
from draftgate.lab.simulate.cluster import SimulatedCluster, simulate_requests
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.types import Record
from draftgate.policies.speculation.survival import evidence_row

CONFIG: Final = WorkerConfig(max_num_seqs=256, max_step_tokens=2048, max_model_len=32_768)
"""The configuration of every planned worker, with the defaults of `draftgate simulate`."""

OFF, AUTO = "off", "auto"


def with_engine(profiles: Iterable[str], engine: str | None) -> list[str]:
    """Return the names of profiles with an engine, except where they name one.

    Raises:
        ValueError: the engine is unknown.
    """
    if engine is None:
        return list(profiles)
    if engine not in ENGINES:
        raise ValueError(f"--engine: expected one of {', '.join(ENGINES)}, not {engine!r}")
    return [name if "@" in name else f"{name}@{engine}" for name in profiles]


def check_speculation_flag(speculation: str) -> None:
    """Check the value of `--speculation`.

    Raises:
        ValueError: it is neither `off` nor `auto`.
    """
    if speculation not in {OFF, AUTO}:
        raise ValueError(f"--speculation: expected off or auto, not {speculation!r}")


@dataclass(frozen=True, slots=True)
class Rentable:
    """A type of machine.

    Attributes:
        name: profile, as given: a shipped or derived name, or the path of a file.
        price: US dollars per hour.
        proposer: what it drafts with.
    """

    name: str
    profile: Profile
    price: float
    proposer: str = "ngram"

    @classmethod
    def load(cls, name: str, proposer: str) -> Rentable:
        """Load a profile.

        Raises:
            ValueError: the profile is unknown, or has no price.
        """
        profile = load_profile(name)
        if profile.price_per_hour_usd is None:
            raise ValueError(f"the profile {name} has no price_per_hour_usd: add it to the file")
        return cls(name, profile, profile.price_per_hour_usd, proposer)

    def machine(self) -> Machine:
        """Return the costs for the prediction of throughputs."""
        profile, host = self.profile, self.profile.host
        draft = profile.draft.get(self.proposer, DraftCost())
        return Machine(
            profile.cost,
            profile.kv_bytes // profile.kv_token_bytes,
            *CONFIG.step_limits("cuda"),
            draft.depths,
            draft.call_s,
            draft.sequence_s,
            host.step_s,
            host.sequence_s,
            host.launches_ahead,
        )

    def drafts(self, class_name: str, output_tokens: int, share: float) -> Sequence[DraftPoint]:
        """Return the ways to draft for requests of a class.

        Args:
            output_tokens: least length of their outputs.
            share: share of the requests that must meet their targets.
        """
        recording = load_recording(self.profile.recording)
        drafts = recorded_drafts(recording, self.proposer, class_name)
        return drafts.points(max(output_tokens, 2), share)


def simulate_machines(
    counts: Mapping[str, int],
    requests: Requests,
    speculation: str,
    proposer: str,
    most_missed: int,
    on_record: Callable[[Record], None] = lambda _record: None,
) -> list[Record]:
    """Return the records of requests on machines with the production scheduler and `least_cost`.

    Args:
        counts: number of machines by profile.
        speculation: policy of the workers.
        most_missed: number of requests that may miss their targets. The simulation ends early when
            more have missed them, and later requests then have no record.
        on_record: receives each record when its request ends.
    """
    names = tuple(name for name, count in counts.items() for _ in range(count))
    config = structs.replace(CONFIG, speculation=speculation, proposer=proposer)
    cluster = SimulatedCluster(config, len(names), SimEnvironment(), profiles=names)
    missed = 0

    def count(record: Record) -> None:
        nonlocal missed
        missed += not meets_slo(record)
        on_record(record)

    sent = takewhile(lambda _planned: missed <= most_missed, requests.planned)
    return simulate_requests(cluster, sent, count, requests.to_job)


@dataclass(frozen=True, slots=True)
class MachineTypes:
    """Machines by the name of their profile, which is short even for files."""

    machines: Mapping[str, Rentable]

    @classmethod
    def load(cls, given: str, proposer: str = "ngram", engine: str | None = None) -> MachineTypes:
        """Read profiles, separated by commas.

        Args:
            proposer: what machines draft with.
            engine: engine of the profiles that name none, or None for their own host costs.

        Raises:
            ValueError: no profile is given, one cannot be read or has no price, or two have one
                name.
        """
        texts = with_engine([text.strip() for text in given.split(",") if text.strip()], engine)
        found = [Rentable.load(text, proposer) for text in texts]
        named = {one.profile.name: one for one in found}
        if not named:
            raise ValueError("--profiles: expected names or files, separated by commas")
        if len(named) < len(found):
            raise ValueError(f"--profiles: two profiles have one name: {', '.join(named)}")
        return cls(named)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the profiles."""
        return tuple(self.machines)

    @property
    def files(self) -> dict[str, str]:
        """What `--profiles` gives for each profile, a name or a file."""
        return {name: one.name for name, one in self.machines.items()}

    @property
    def prices(self) -> dict[str, float]:
        """The price of an hour of each machine, in USD."""
        return {name: one.price for name, one in self.machines.items()}

    @property
    def powers(self) -> dict[str, float]:
        """The power of each machine, in watts.

        Raises:
            ValueError: a profile has no power.
        """
        found = {}
        for name, one in self.machines.items():
            if one.profile.power_w is None:
                raise ValueError(f"the profile {name} has no power_w: add it to the file")
            found[name] = one.profile.power_w
        return found

    def forecast(
        self, requests: Sequence[tuple[int, int]], lengths: MeanLengths, targets: Targets
    ) -> Forecast:
        """Return the estimates of rates for requests, given as tokens of prompt and output."""
        machines = {name: one.machine() for name, one in self.machines.items()}
        return Forecast.for_requests(machines, targets, requests, lengths.context_tokens)

    def bounds(
        self, lengths: MeanLengths, targets: Targets, classes: Collection[str] = ()
    ) -> dict[str, RateBounds]:
        """Return the bounds of one machine of each type.

        Args:
            classes: classes of requests. The bounds are those with the best drafts of any class.
        """
        outputs = round(lengths.output_tokens)
        return {
            name: bounds(
                one.machine(),
                lengths,
                targets,
                [point for kind in classes for point in one.drafts(kind, outputs, targets.share)],
            )
            for name, one in self.machines.items()
        }


# --- What drafts gain in recorded texts, for planning ---------------------------------------------
#
# `auto` verifies the slots whose survival exceeds their price. Each price is therefore a way to
# draft, with a mean number of draft tokens and accepted tokens per step.


PRICES: Final = (0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.05)
"""Prices of a slot, from those of a full batch to those of a lone request."""

TEXTS: Final = 32
"""Largest number of texts per class. More texts change the means by less than the differences
between classes, and take more time."""


class RecordedDrafts:
    """The drafts of one proposer for one class of requests."""

    def __init__(self, recording: Recording, proposer: str, class_name: str) -> None:
        texts = recording.texts(class_name, 0.0)
        guesses = [_guesses(text, proposer) for text in texts[:: -(-len(texts) // TEXTS)]]
        survivals = _survivals(guesses)
        self._choices = [_Choice.at(price, guesses, survivals) for price in PRICES]

    def points(self, output_tokens: int, share: float) -> tuple[DraftPoint, ...]:
        """Return the ways to draft that accept any tokens.

        Args:
            output_tokens: length of a response, because few tokens vary more than many.
            share: share of the responses that have at least `DraftPoint.least_tokens`.
        """
        return tuple(
            DraftPoint(
                choice.drafted / choice.steps,
                choice.accepted / choice.steps,
                _quantile(choice.response_tokens(output_tokens), 1.0 - share),
                choice.depth,
            )
            for choice in self._choices
            if choice.accepted
        )


@dataclass(frozen=True, slots=True)
class _Choice:
    """The steps through all texts with the slots that are worth a price.

    Attributes:
        paths: accepted tokens of each step, by text.
        drafted: draft tokens of all steps.
        depth: slots of the longest draft.
    """

    paths: tuple[tuple[int, ...], ...]
    drafted: int
    depth: int

    @classmethod
    def at(
        cls,
        price: float,
        texts: Sequence[Sequence[Guess]],
        survivals: Mapping[int, Sequence[float]],
    ) -> _Choice:
        slots = {row: _slots(chain, price) for row, chain in survivals.items()}
        paths, drafted = [], 0
        for text in texts:
            path, position = [], 0
            while position < len(text):
                draft = _cut(text[position], slots)
                drafted += draft.proposed
                path.append(draft.agreed)
                position += 1 + draft.agreed
            paths.append(tuple(path))
        return cls(tuple(paths), drafted, max(slots.values(), default=0))

    @property
    def steps(self) -> int:
        return sum(map(len, self.paths))

    @property
    def accepted(self) -> int:
        return sum(map(sum, self.paths))

    def response_tokens(self, output_tokens: int) -> list[float]:
        """Return the tokens per step of responses, which are consecutive parts of the texts."""
        ratios = []
        for path in self.paths:
            steps = tokens = 0
            for accepted in path:
                steps += 1
                tokens += 1 + accepted
                if tokens >= output_tokens:
                    ratios.append(tokens / steps)
                    steps = tokens = 0
        return ratios or [1.0 + self.accepted / self.steps]


@cache
def recorded_drafts(recording: Recording, proposer: str, class_name: str) -> RecordedDrafts:
    """Return the drafts of a class, computed once."""
    return RecordedDrafts(recording, proposer, class_name)


def _guesses(text: Text, proposer: str) -> list[Guess]:
    return [text.guess(proposer, position) for position in range(text.length)]


def _survivals(texts: Sequence[Sequence[Guess]]) -> dict[int, list[float]]:
    """Return the survival of each slot by the evidence of the draft (`evidence_row`)."""
    proposed = defaultdict[int, list[int]](lambda: [0] * SLOTS)
    agreed = defaultdict[int, list[int]](lambda: [0] * SLOTS)
    for guess in (guess for text in texts for guess in text if guess.proposed):
        row = evidence_row(guess.evidence, guess.agreement)
        for slot in range(guess.proposed):
            proposed[row][slot] += 1
            agreed[row][slot] += slot < guess.agreed
    return {
        row: [right / max(all_, 1) for right, all_ in zip(agreed[row], counts, strict=True)]
        for row, counts in proposed.items()
    }


def _slots(survivals: Sequence[float], price: float) -> int:
    """Return the number of leading slots that are worth a price."""
    return next((n for n, survival in enumerate(survivals) if survival <= price), len(survivals))


def _cut(guess: Guess, slots: Mapping[int, int]) -> Guess:
    """Return the first tokens of a draft that are worth the price."""
    if not guess.proposed:
        return guess
    return guess.first(slots[evidence_row(guess.evidence, guess.agreement)])


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of the values does not exceed."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
