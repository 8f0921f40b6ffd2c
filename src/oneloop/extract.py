"""How an answer is read out of a response. One per run: the same before training, after it and in the reward."""

from __future__ import annotations

import re

EXTRACTS = ("verbatim", "last_number", "tag", "boxed")
ASKS = {  # what a prompt adds so that the model can know the format
    "verbatim": " Reply with the answer alone.",
    "last_number": "",
    "tag": " Put the answer between <answer> and </answer>.",
    "boxed": " Put the answer in \\boxed{}.",
}
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LONGEST = 20_000  # characters of a response that are looked at, from its end


def extract(text: str, how: str) -> str | None:
    """The answer in a response, or None where the response has none in this format."""
    text = text[-LONGEST:]
    if how == "verbatim":
        return text.strip() or None
    if how == "last_number":
        found = _NUMBER.findall(text)
        return found[-1].rstrip(",") if found else None
    if how == "tag":
        found = _TAG.findall(text)
        return found[-1].strip() if found else None
    if how == "boxed":
        return _boxed(text)
    raise ValueError(f"extract = {how!r}: one of {', '.join(EXTRACTS)}")


def _boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...}, braces balanced."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for i in range(begin - 1, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin:i].strip()
    return None
