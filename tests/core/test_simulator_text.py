"""The simulator's tokenizer, chat template and answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.core import tokenizer
from simulator.core.chat_template import render_chat
from simulator.core.errors import InvalidBodyError, RequestRefusedError
from simulator.core.generation import FixedTokens, seed_answer

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT)
def test_decoding_undoes_encoding(text: str) -> None:
    """Every text comes back, special strings included."""
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@given(TEXT, TEXT)
def test_tokens_of_a_text_begin_with_the_tokens_of_its_beginning(left: str, right: str) -> None:
    """Appending a turn never changes the tokens before it."""
    whole = tokenizer.encode(left + "<|im_end|>" + right, add_special_tokens=False)
    part = tokenizer.encode(left + "<|im_end|>", add_special_tokens=False)

    assert whole[: len(part)] == part


def test_special_strings_are_single_tokens() -> None:
    """A marker is one id wherever it stands; the begin token comes once and on request."""
    assert tokenizer.encode("<|im_start|>a<|im_end|>", add_special_tokens=True) == [
        256,
        257,
        97,
        258,
    ]


def test_specials_and_ids_without_meaning_can_be_left_out() -> None:
    """Ids that aren't bytes decode to their marker or U+FFFD, or to nothing."""
    assert tokenizer.decode([97, 258, 5000, 98]) == "a<|im_end|>\ufffdb"
    assert tokenizer.decode([97, 258, 5000, 98], skip_special_tokens=True) == "ab"


def test_a_lone_surrogate_does_not_break_the_tokenizer() -> None:
    """JSON may carry what UTF-8 can't."""
    assert tokenizer.encode("\ud800", add_special_tokens=False) == [ord("?")]


def test_tokens_are_described_one_by_one() -> None:
    """Half a character is shown as a replacement character."""
    assert tokenizer.describe_tokens([97, 0xC3, 257]) == ["a", "\ufffd", "<|im_start|>"]


def test_conversation_is_rendered_as_chatml() -> None:
    """Roles and contents between markers, the answer's head at the end."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]

    assert render_chat(messages) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )


def test_next_turn_extends_the_prompt_with_the_answer() -> None:
    """A prompt and its answer are the beginning of the next turn's prompt."""
    messages = [{"role": "user", "content": "u"}]
    first = render_chat(messages)
    second = render_chat(
        [*messages, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
    )

    assert second.startswith(first + "a<|im_end|>\n")


@given(st.lists(TEXT, min_size=1, max_size=5))
def test_a_conversation_s_prompt_only_grows(contents: list[str]) -> None:
    """Without generation head each turn's prompt begins with that of the turn before."""
    messages = [{"role": "user", "content": content} for content in contents]
    shorter = render_chat(messages[:-1], add_generation_prompt=False)

    assert render_chat(messages, add_generation_prompt=False).startswith(shorter)


def test_tools_come_before_everything_else() -> None:
    """Tool descriptions are part of the prompt."""
    text = render_chat([{"role": "user", "content": "u"}], tools=[{"name": "f"}])

    assert text.startswith("<|im_start|>system\n# Tools")
    assert '{"name":"f"}' in text


def test_tool_calls_of_an_earlier_answer_are_rendered() -> None:
    """A message without content but with calls shows the calls."""
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}

    assert '<tool_call>{"id":"1"}</tool_call>' in render_chat([message])


def test_final_message_can_be_continued() -> None:
    """The last message stays open and no new answer is begun."""
    message = {"role": "assistant", "content": "Once"}

    text = render_chat([message], add_generation_prompt=False, continue_final_message=True)

    assert text == "<|im_start|>assistant\nOnce"


def test_prompt_without_generation_head() -> None:
    """`add_generation_prompt` False ends with the last message."""
    text = render_chat([{"role": "user", "content": "u"}], add_generation_prompt=False)

    assert text.endswith("u<|im_end|>\n")


def test_text_parts_are_joined() -> None:
    """Parts may be strings, texts or refusals."""
    content = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]

    assert "a\nb\nc" in render_chat([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        pytest.param([{"content": "x"}], InvalidBodyError, id="no-role"),
        pytest.param([{"role": "user", "content": 4}], InvalidBodyError, id="number"),
        pytest.param([{"role": "user", "content": [4]}], InvalidBodyError, id="number-part"),
        pytest.param(
            [{"role": "user", "content": [{"type": "image_url"}]}], RequestRefusedError, id="image"
        ),
    ],
)
def test_malformed_messages_are_refused(
    messages: list[dict[str, object]], error: type[RequestRefusedError]
) -> None:
    """What the template can't render is the client's mistake."""
    with pytest.raises(error):
        render_chat(messages)


def test_continuing_and_beginning_exclude_each_other() -> None:
    """Both flags at once are refused."""
    with pytest.raises(RequestRefusedError):
        render_chat([{"role": "user", "content": "u"}], continue_final_message=True)


def test_answer_depends_on_the_prompt_alone() -> None:
    """The same prompt gives the same answer, another prompt or choice another."""

    def text(prompt: list[int], choice: int = 0) -> bytes:
        answer = seed_answer(prompt, choice)
        return bytes(answer.token_at(index, may_end=False) for index in range(40))

    assert text([1, 2, 3]) == text([1, 2, 3])
    assert text([1, 2, 3]) != text([1, 2, 4])
    assert text([1, 2, 3]) != text([1, 2, 3], 1)
    assert text([1, 2, 3]).isascii()


def test_answer_ends_by_itself_unless_it_may_not() -> None:
    """The end comes after 64 to 255 tokens where it is allowed, and never elsewhere."""
    answer = seed_answer([1])
    tokens = [answer.token_at(index, may_end=True) for index in range(256)]
    end = tokens.index(tokenizer.END_OF_TEXT_ID)

    assert 64 <= end < 256
    assert answer.token_at(end, may_end=False) != tokenizer.END_OF_TEXT_ID


def test_recorded_answer_ends_where_the_record_ends() -> None:
    """After the last recorded token comes the end, or filler where no end is allowed."""
    answer = FixedTokens([7, 8])

    assert [answer.token_at(index, may_end=True) for index in range(3)] == [7, 8, 258]
    assert answer.token_at(2, may_end=False) == ord(" ")
