"""Turns the tokens of one answer into text, holding back what might become a stop string."""

import codecs

from simulator.core.tokenizer import END_OF_TEXT_ID


class TextOutput:
    """The text of one choice as it grows."""

    def __init__(self, stop_strings: list[str]) -> None:
        self._stops = [stop for stop in stop_strings if stop]
        self._held_back = max(map(len, self._stops), default=1) - 1
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        self._sent = 0
        self.stop_string: str | None = None

    @property
    def text(self) -> str:
        """Everything generated so far, cut at the stop string."""
        return self._text

    def push(self, token_id: int, *, may_stop: bool) -> bool:
        """Take one token; True if it completed a stop string."""
        if token_id == END_OF_TEXT_ID:
            return False
        added = "\ufffd" if token_id > 255 else self._bytes.decode(bytes((token_id,)))
        searched_from = max(0, len(self._text) - self._held_back)
        self._text += added
        if not may_stop:
            return False
        for stop in self._stops:
            found = self._text.find(stop, searched_from)
            if found >= 0:
                self._text = self._text[:found]
                self.stop_string = stop
                return True
        return False

    def take(self, *, is_final: bool) -> str:
        """Return the text that may be sent and hasn't been."""
        end = len(self._text) if is_final else max(self._sent, len(self._text) - self._held_back)
        text = self._text[self._sent : end]
        self._sent = end
        return text
