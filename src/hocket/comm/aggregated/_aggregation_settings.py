"""Where this process's aggregator is, as the environment says."""

import os
from dataclasses import dataclass
from typing import Final

from hocket.aggregator import AddressError, TokenError, parse_address, read_tokens

from ..transport import CommError

ADDRESS_VARIABLE: Final = "HOCKET_AGGREGATOR"
TOKEN_VARIABLE: Final = "HOCKET_AGGREGATOR_TOKEN_FILE"
STALL_VARIABLE: Final = "HOCKET_AGGREGATOR_STALL_S"


@dataclass(frozen=True, slots=True)
class AggregationSettings:
    """Where this process's aggregator is."""

    addresses: tuple[tuple[str, int], ...]  # host and port; several aggregators share long messages
    token: bytes  # token of the job
    stall_s: float = 5.0  # seconds of silence after which it counts as lost

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.addresses)

    @classmethod
    def from_environment(cls) -> "AggregationSettings | None":
        """Return what HOCKET_AGGREGATOR, HOCKET_AGGREGATOR_TOKEN_FILE and HOCKET_AGGREGATOR_STALL_S say, or None.

        Raises:
            CommError: a variable that cannot be used.
        """
        address = os.environ.get(ADDRESS_VARIABLE)
        if not address:
            return None
        token_file = os.environ.get(TOKEN_VARIABLE)
        if not token_file:
            raise CommError(
                f"{ADDRESS_VARIABLE} is set to {address!r} but {TOKEN_VARIABLE} is not; set both or neither"
            )
        try:
            stall_s = float(os.environ.get(STALL_VARIABLE, "5"))
            if not stall_s > 0:
                raise ValueError(f"{STALL_VARIABLE} is {stall_s}; give seconds above 0")
            return cls(tuple(map(parse_address, address.split(","))), read_tokens(token_file)[0], stall_s)
        except (AddressError, TokenError, ValueError) as error:
            raise CommError(f"the aggregator of {ADDRESS_VARIABLE} cannot be used: {error}") from None
