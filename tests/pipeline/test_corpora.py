"""Sources of text: what they yield, how they split, and the errors they give."""

import json
import sysconfig
from pathlib import Path

import pytest

from pipeline import corpora
from pipeline.core.errors import UserError
from pipeline.corpora import (
    ChatCorpus,
    Document,
    JsonlCorpus,
    ParquetCorpus,
    PythonCode,
    PythonProse,
    Segment,
    TextCorpus,
)


def texts(corpus):
    return [document.content for document in corpus.documents()]


def write_lines(path: Path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_yields_a_document_per_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": "zwei €"})
    with open(path, "a") as file:
        file.write("\n")  # blank lines are skipped
    found = list(JsonlCorpus(path=path, name="notes").documents())
    assert [(d.id, d.content) for d in found] == [("a.jsonl:1", "one"), ("a.jsonl:2", "zwei €")]


def test_patterns_read_files_in_order(tmp_path):
    write_lines(tmp_path / "b.jsonl", {"text": "second"})
    write_lines(tmp_path / "a.jsonl", {"text": "first"})
    assert texts(JsonlCorpus(path=f"{tmp_path}/*.jsonl", name="notes")) == ["first", "second"]


def test_text_files_are_split_by_the_separator(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n\n")
    whole = TextCorpus(path=str(tmp_path / "a.txt"), name="notes")
    assert texts(whole) == ["one\n\ntwo\n\n\n"]
    parts = TextCorpus(path=str(tmp_path / "a.txt"), name="notes", separator="\n\n")
    assert texts(parts) == ["one", "two"]
    assert whole.content_hash() != parts.content_hash()


def test_parquet_yields_a_document_per_row(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "two"], "n": [1, 2]}), path)
    assert texts(ParquetCorpus(path=str(path), name="rows")) == ["one", "two"]
    with pytest.raises(UserError, match=r"a.parquet: no column 'body'; it has 'text', 'n'"):
        texts(ParquetCorpus(path=str(path), name="rows", field="body"))
    with pytest.raises(UserError, match="row 1: column 'n' holds int"):
        texts(ParquetCorpus(path=str(path), name="rows", field="n"))
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match="not readable as Parquet"):
        texts(ParquetCorpus(path=str(path), name="rows"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"body": "x"}', r"a.jsonl:2: no field 'text'; it has 'body'"),
        (b'{"text": 3}', r"a.jsonl:2: field 'text' holds int, expected str"),
        (b'{"text": "x"', r"a.jsonl:2: not JSON"),
        (b'["x"]', r"a.jsonl:2: expected a JSON object, found list"),
        (b'{"text": "\xff"}', r"a.jsonl:2: byte 10 \(0xff\) is not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(UserError, match=message):
        texts(JsonlCorpus(path=str(path), name="notes"))


def test_undecodable_text_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(UserError, match=r"a.txt: byte 2 \(0xef\) is not UTF-8; convert the file"):
        texts(TextCorpus(path=f"{tmp_path}/*.txt", name="notes"))


def test_missing_files_are_named(tmp_path):
    for path in (f"{tmp_path}/none.txt", f"{tmp_path}/*.txt"):
        with pytest.raises(UserError, match="no file"):
            texts(TextCorpus(path=path, name="notes"))


def test_chat_needs_an_answer(tmp_path):
    question = {"role": "user", "content": "?"}
    path = write_lines(tmp_path / "a.jsonl", {"messages": [question]})
    with pytest.raises(UserError, match=r"a.jsonl:1: no message with the role 'assistant'"):
        list(ChatCorpus(path=path, name="chat").documents())
    path = write_lines(tmp_path / "b.jsonl", {"messages": ["hello"]})
    with pytest.raises(UserError, match=r"b.jsonl:1: 'messages' must list objects with a role"):
        list(ChatCorpus(path=path, name="chat").documents())


def test_the_split_depends_on_content_alone():
    def document(name, text):
        return Document(id=name, segments=(Segment(text),))

    sides = [document(str(i), f"text {i}").is_held_out(0.3) for i in range(1000)]
    assert 0.25 < sum(sides) / 1000 < 0.35
    assert sides == [document("another", f"text {i}").is_held_out(0.3) for i in range(1000)]
    assert not any(document("a", f"text {i}").is_held_out(0.0) for i in range(1000))
    # What is held out at 10% stays so at 30%.
    fewer = [document("a", f"text {i}").is_held_out(0.1) for i in range(1000)]
    assert all(b for a, b in zip(fewer, sides, strict=True) if a)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of a few files."""
    root = tmp_path / "lib"
    files = {
        "tool.py": '"""A tool."""\n\ndef use():\n    """Use it."""\n    return "\\d"\n',
        "plain.py": "x = 1\n",
        "latin.py": "# -*- coding: latin-1 -*-\nname = 'é'\n",
        "package/__init__.py": "",
        "package/part.py": '"""A part."""\n',
        "package/tests/test_part.py": '"""A test."""\n',
        "test/test_tool.py": '"""A test."""\n',
        "encodings/table.py": '"""A table."""\n',
        "config-3/made.py": '"""Made."""\n',
        "_sysconfigdata_x.py": '"""Made."""\n',
        "site-packages/other.py": '"""Other."""\n',
        "pydoc_data/topics.py": "topics = {'for': 'The for statement', 'if': 'The if statement'}\n",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode("latin-1" if name == "latin.py" else "utf-8"))
    monkeypatch.setattr(corpora, "_library", lambda: root)
    return root


def test_python_code_is_the_library_without_tests_and_tables(library):
    found = {document.id: document.content for document in PythonCode().documents()}
    assert list(found) == ["latin.py", "package/part.py", "plain.py", "tool.py"]
    assert found["latin.py"].endswith("name = 'é'\n")


def test_python_prose_is_topics_and_docstrings(library):
    found = {document.id: document.content for document in PythonProse().documents()}
    assert found == {
        "topic:for": "The for statement",
        "topic:if": "The if statement",
        "docstrings:package/part.py": "A part.",
        "docstrings:tool.py": "A tool.\n\nUse it.",
    }


def test_docstrings_fall_on_the_side_of_their_file(library):
    for i in range(200):
        (library / f"m{i}.py").write_text(f'"""Module {i}."""\nvalue = {i}\n')
    code = {d.id: d.is_held_out(0.3) for d in PythonCode().documents()}
    prose = {d.id: d.is_held_out(0.3) for d in PythonProse().documents()}
    docstrings = {k.removeprefix("docstrings:"): v for k, v in prose.items() if "topic" not in k}
    assert len(docstrings) > 200
    assert 0 < sum(docstrings.values()) < len(docstrings)
    assert all(code[name] == side for name, side in docstrings.items())


def test_embedded_corpora_notice_a_changed_library(library):
    before = PythonCode().content_hash(), PythonProse().content_hash()
    assert before == (PythonCode().content_hash(), PythonProse().content_hash())
    (library / "plain.py").write_text("x = 2\n")
    assert before[0] != PythonCode().content_hash()
    assert before[1] != PythonProse().content_hash()
    (library / "bad.py").write_bytes(b"x = '\xff'\n")
    with pytest.raises(UserError, match=r"bad.py: not a readable source file"):
        list(PythonCode().documents())


def test_a_first_look_reads_every_nth_file_of_the_library():
    all_of_it, some = PythonCode(), PythonCode(every=40)
    names = [document.id for document in some.documents()]
    everything = [document.id for document in all_of_it.documents()]
    assert set(names) < set(everything)
    assert len(names) == pytest.approx(len(everything) / 40, abs=2)
    assert some.content_hash() != all_of_it.content_hash()
    assert PythonProse(every=40).content_hash() != PythonProse().content_hash()
    with pytest.raises(ValueError, match=r"PythonProse.every = 0 must be positive"):
        PythonProse(every=0)


def test_this_interpreter_has_both():
    assert Path(sysconfig.get_path("stdlib")) == corpora._library()
    assert sum(len(d.content) for d in PythonCode().documents()) > 5e6
    assert "while" in corpora._topics()
