"""New members of gguf-py's enums, which name the types of tensors and files."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeVar

Member = TypeVar("Member", bound=IntEnum)


def add_member(enum: type[Member], name: str, value: int) -> Member:
    """Add a member to an existing IntEnum, or return the one that is there.

    gguf-py names tensor types through enums that cannot be subclassed once they have members, and looks types up by
    value in readers and writers, so a type it does not know has to become a member.

    Raises:
        RuntimeError: the number already stands for something else.
    """
    members: dict[Any, Any] = enum._value2member_map_
    if value in members:
        if members[value].name != name:
            raise RuntimeError(f"gguf {enum.__name__} {value} is {members[value].name}, not {name}; update gguf-itq3s")
        return enum(value)
    member = int.__new__(enum, value)
    member._name_, member._value_ = name, value
    # Enum classes refuse plain attribute assignment of new names only through their metaclass.
    type.__setattr__(enum, name, member)
    enum._member_names_.append(name)  # type: ignore[attr-defined]
    enum._member_map_[name] = member  # type: ignore[attr-defined]
    members[value] = member
    return member
