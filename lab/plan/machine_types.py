"""The types of machines from which a plan of deployments chooses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from draftgate.lab.plan.machines import Rentable
from draftgate.lab.planning.bounds import Bounds, Lengths, bounds
from draftgate.lab.planning.throughput import Targets


@dataclass(frozen=True, slots=True)
class MachineTypes:
    """Machines by the name of their profile, which is short even for files."""

    machines: Mapping[str, Rentable]

    @classmethod
    def load(cls, given: str, proposer: str = "ngram") -> MachineTypes:
        """Read profiles, separated by commas.

        Args:
            proposer: what machines draft with.

        Raises:
            ValueError: no profile is given, one cannot be read or has no price, or two have one
                name.
        """
        texts = [text.strip() for text in given.split(",") if text.strip()]
        found = [Rentable.of(text, proposer) for text in texts]
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

    def bounds(
        self, lengths: Lengths, targets: Targets, classes: Collection[str] = ()
    ) -> dict[str, Bounds]:
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
