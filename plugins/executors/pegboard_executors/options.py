"""The options of the executor."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator


class ProcessesOptions(BaseModel):
    """How the workers' processes are started and reached.

    Attributes:
        address: `auto`: workers run on this machine, and no file and no port stands for the way to
            them. Else the address of this machine by which workers on others reach it: TCP, on a port
            that the system chooses.
        launch: words that are put before the command of each worker, such as `[ssh, node-2]`; what they
            start must pass on its standard input.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field("auto", min_length=1)
    launch: tuple[str, ...] = ()

    @field_validator("address")
    @classmethod
    def _refuse_ports(cls, address: str) -> str:
        has_port = address.count(":") == 1 or "]:" in address  # else colons are of IPv6
        if has_port or "/" in address or any(char.isspace() for char in address):
            raise ValueError("auto, or a host's name or address alone, such as 10.0.0.5")
        return address
