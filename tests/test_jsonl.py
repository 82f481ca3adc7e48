"""JSON Lines files that a crash has torn, and text that looks like a line's end.

Example
    python -m pytest tests/test_jsonl.py
"""
import json

import pytest
from jsonl import Appender, read
from stage import Refused

FIRST, SECOND = {"id": "a", "text": "first"}, {"id": "b", "text": "zweite Zeile: 你好 🙂"}
WHOLE = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in (FIRST, SECOND)).encode()
NEW = {"id": "c", "text": "new"}


def after_append(path, data, row=NEW):
    """The rows of a file that held `data` when it was opened and `row` was appended."""
    path.write_bytes(data)
    with Appender(path) as file:
        file.write(row)
    return [row for _, row in read(path)]


def test_a_file_cut_at_any_byte_loses_the_torn_row_only(tmp_path):
    first_line = WHOLE.index(b"\n") + 1
    for cut in range(first_line, len(WHOLE) + 1):  # inside strings, inside every multi-byte character, before the newline
        whole = [FIRST, SECOND] if cut >= len(WHOLE) - 1 else [FIRST]  # a line that lacks only its newline is kept
        assert after_append(tmp_path / "rows.jsonl", WHOLE[:cut]) == [*whole, NEW], WHOLE[:cut]


def test_a_file_of_one_torn_line_and_an_empty_file_start_afresh(tmp_path):
    for data in (b"", b"{", b'{"id": "a', '{"id": "ü'.encode()[:-1], b"\x00\x00\x00\x00"):
        assert after_append(tmp_path / "rows.jsonl", data) == [NEW], data


def test_a_torn_row_longer_than_a_block_is_removed_whole(tmp_path):
    long = json.dumps({"id": "b", "text": "你" * 100_000}, ensure_ascii=False).encode()
    assert after_append(tmp_path / "rows.jsonl", WHOLE + long[:-5]) == [FIRST, SECOND, NEW]
    assert len(after_append(tmp_path / "rows.jsonl", WHOLE + long)) == 4


def test_opening_a_whole_file_changes_no_byte(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(WHOLE)
    with Appender(path):
        pass
    assert path.read_bytes() == WHOLE


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\v", "\f", "\r", "\r\n", "\n", "\x00", "\x1c", "\ufeff"],
                         ids=lambda c: ascii(c))
def test_characters_that_end_lines_elsewhere_stay_inside_their_row(tmp_path, character):
    odd = {"id": f"x{character}", "text": f"{character}before{character}after{character}"}
    assert after_append(tmp_path / "rows.jsonl", WHOLE, odd) == [FIRST, SECOND, odd]
    assert (tmp_path / "rows.jsonl").read_bytes().count(b"\n") == 3


def test_a_carriage_return_between_tokens_ends_no_line(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'{"id": "a",\r "text": "t"}\r\n{"id": "b"}\r\n')
    assert [(number, row["id"]) for number, row in read(path)] == [(1, "a"), (2, "b")]


def test_a_row_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    with Appender(path) as file:
        for number in range(1, 4):
            file.write(NEW)
            assert path.read_bytes().count(b"\n") == number


def test_blank_lines_are_no_rows_but_keep_their_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n" + WHOLE.replace(b"\n", b"\n  \n"))
    assert [number for number, _ in read(path)] == [2, 4]


@pytest.mark.parametrize("line, complaint", [(b"{not json}", "not JSON"), (b'{"id": "torn', "not JSON"), (b"[1, 2]", "list"),
                                             (b'"text"', "str"), (b"7", "int"), (b"null", "NoneType")])
def test_a_line_that_is_no_object_is_named_with_its_file(tmp_path, line, complaint):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(WHOLE + line + b"\n" + WHOLE)
    with pytest.raises(Refused) as refused:
        list(read(path))
    assert f"{path} line 3" in str(refused.value) and complaint in str(refused.value)


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(WHOLE + '{"id": "ü"}\n'.encode("latin-1"))
    with pytest.raises(Refused) as refused:
        list(read(path))
    assert str(path) in str(refused.value) and "UTF-8" in str(refused.value)


def test_a_line_that_is_not_utf8_is_named_with_its_number(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(WHOLE * 500 + '{"id": "ü"}\n'.encode("latin-1"))
    with pytest.raises(Refused) as refused:
        list(read(path))
    assert f"{path} line 1001" in str(refused.value)


def test_half_an_emoji_from_a_server_is_a_row_like_any_other(tmp_path):
    reply = json.loads(r'{"id": "d", "text": "cut here: \ud83d"}')  # JSON allows it, UTF-8 does not
    rows = after_append(tmp_path / "rows.jsonl", WHOLE, reply)
    assert [row["id"] for row in rows] == ["a", "b", "d"]
