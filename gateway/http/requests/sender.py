"""What a request has beside its body."""

from __future__ import annotations

from draftgate.gateway.accounts import ANONYMOUS, Account
from draftgate.policies.types import ANYTIME, ServiceLevel
from draftgate.policies.values import immutable, replace


@immutable
class Sender:
    """The account, the headers and the id of a request.

    Attributes:
        request_id: an id that is unique on this node.
        service: the latency targets in the headers.
        retries: how often the client has sent the request before, or None if unknown.
        fingerprint: a hash that is equal for a retry of the same request, or 0 if unknown.
    """

    request_id: str
    account: Account = ANONYMOUS
    service: ServiceLevel = ANYTIME
    retries: int | None = None
    fingerprint: int = 0

    def service_level(self, priority: int | None) -> ServiceLevel:
        """Return the service level of the request, within the bounds of its account.

        Args:
            priority: the priority in the body, or None.
        """
        wanted = replace(self.service, priority=priority) if priority else self.service
        return self.account.capped(wanted)
