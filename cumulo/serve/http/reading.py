"""Reading: where a connection stands with the request that it reads. Used by Connection."""

import enum


class Reading(enum.Enum):
    """What the client is to send next."""

    FIRST_BYTE = "sent nothing"
    HEAD = "half a header"
    BODY = "half a body"
    DONE = "whole request"
    NEXT = "idle after a request"
    NOTHING = "refused"
