"""Numbers of the environment: machine settings, which change no result.

    settings.whole("CONCURRENCY", 64, least=1)       # 64 where it is not set or empty; Refused if it is "many", 0 or 2.5
    settings.number("STALL_EXIT", 30, time="m")      # seconds; 30 and 30m and 1800s are the same
"""
import math
import os

UNITS = {"s": 1, "m": 60, "h": 3600}


class Refused(Exception):
    """What the user can mend, in one sentence: file, line or row, the value found and the value wanted.  Exit code 2."""


def number(name, default, least=0, time=None):
    """The number that `name` is set to, else the default; Refused if it is none, or below `least`.

    time: the result is in seconds, and the text in these units unless it names its own: 90s, 20m, 2h."""
    text = os.environ.get(name) or str(default)
    amount, unit = (text[:-1], text[-1]) if time and text[-1] in UNITS else (text, time)
    try:
        value = float(amount) * UNITS.get(unit, 1)
    except ValueError:
        value = math.nan
    if not value >= (least if os.environ.get(name) else value):
        raise Refused(f"{name}={text}: wanted a {'time, as 90s, 20m or 2h' if time else 'number'}, {least:g} or more")
    return value


def whole(name, default, least=0):
    """The whole number that `name` is set to."""
    value = number(name, default, least)
    if value % 1 != 0:  # of infinity, not a number
        raise Refused(f"{name}={os.environ[name]}: wanted a whole number")
    return int(value)
