"""Numbers of the environment: machine settings, which change no result.

    settings.number("CONCURRENCY", 64, least=1)      # 64 where it is not set or empty; Refused if it is "many" or 0
"""
import math
import os

UNITS = {"s": 1, "m": 60, "h": 3600}


class Refused(Exception):
    """What the user can mend, in one sentence: file, line or row, the value found and the value wanted.  Exit code 2."""


def number(name, default, least=0):
    """The number that `name` is set to, a time also as 90s, 20m or 2h; Refused if it is none, or below `least`."""
    text = os.environ.get(name) or str(default)
    try:
        value = float(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else float(text)
    except ValueError:
        value = math.nan
    if not value >= least:
        raise Refused(f"{name}={text}: wanted a number, {least:g} or more")
    return value
