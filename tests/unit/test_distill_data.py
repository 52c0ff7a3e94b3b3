"""Prompts: read, written by rule, told apart, and never those of the evaluation sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.distill import guard, prompts
from outrider.distill.data import Prompt, is_held_out, read_prompts, write_prompts
from outrider.distill.follow import follow_prompts
from outrider.distill.invent import domain_of, usable
from outrider.errors import ConfigError

EVALUATED = (
    "A farmer has seventeen sheep and all but nine of them run away, so how many sheep are left with the farmer?"
)


def test_both_formats_are_read(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    records = [
        {"prompt": "Hello there"},
        {"question": "What is 2 + 2?", "domain": "maths"},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
        {"prompt": "Hello there"},
    ]
    lines.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    read = read_prompts(lines)
    assert [(p.messages[-1][1], p.domain) for p in read] == [
        ("Hello there", "chat"),
        ("What is 2 + 2?", "maths"),
        ("Hi", "chat"),
    ]
    assert [p.text for p in read_prompts(lines, "maths")] == ["What is 2 + 2?"]
    text = tmp_path / "prompts.txt"
    text.write_text("One prompt\n\nAnother one\n")
    assert [p.text for p in read_prompts(text)] == ["One prompt", "Another one"]
    write_prompts(tmp_path / "again.jsonl", [*read, Prompt((("user", "line\u2028separators stay"),))])
    assert read_prompts(tmp_path / "again.jsonl")[-1].text == "line\u2028separators stay"
    write_prompts(tmp_path / "again.jsonl", read)
    assert read_prompts(tmp_path / "again.jsonl") == read


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1 is not JSON"),
        ('{"answer": "no prompt"}', "line 1 has neither a text"),
        ('{"messages": [{"role": "user"}]}', "line 1 has neither a text"),
        ('{"prompt": "a", "domain": "cooking"}', "'cooking' is unknown; use one of chat, maths, code"),
        ("", "no prompts of the domain 'all'"),
    ],
)
def test_unusable_files_are_refused_by_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "absent.txt")


def test_evaluation_prompts_are_found_whole_and_inside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = frozenset(guard.hashes_of([EVALUATED]))
    assert guard.is_evaluation(EVALUATED.upper().replace(",", " ;"), known)
    assert guard.is_evaluation(f"Answer quickly! {EVALUATED} Think.", known)
    assert not guard.is_evaluation(EVALUATED.replace("sheep", "goats"), known)
    monkeypatch.setattr(guard, "evaluation_hashes", lambda: known)
    path = tmp_path / "prompts.txt"
    path.write_text(f"Fine\nQ: {EVALUATED}\n")
    with pytest.raises(ConfigError, match="line 2 is an evaluation prompt"):
        read_prompts(path)


def test_the_packaged_hashes_are_those_of_the_evaluation_sets() -> None:
    folder = os.environ.get("OUTRIDER_DATA")
    if not folder:
        pytest.skip("OUTRIDER_DATA names no folder with the evaluation sets")

    def records_of(name: str) -> list[dict]:
        return [json.loads(line) for line in Path(folder, f"{name}.jsonl").open(encoding="utf-8")]

    for name, key in (("spec_bench", "turns"), ("gsm8k_test", "question"), ("humaneval", "prompt")):
        records = records_of(name)
        texts = [record[key] if key != "turns" else record[key][0] for record in records]
        missed = [text for text in texts if len(text.split()) >= 5 and not guard.is_evaluation(text)]
        assert not missed
    train = [record["question"] for record in records_of("gsm8k_train")]
    assert not any(guard.is_evaluation(question) for question in train[:300])


def test_prompts_are_written_by_rule_and_seed() -> None:
    passages = prompts.passages_of(
        "\n\n".join(
            f"Paragraph {i} tells about a long walk to town number {i} and what was seen there." for i in range(40)
        ),
        count=10,
    )
    assert len(passages) == 10
    assert all(90 <= len(passage.split()) <= 320 for passage in passages)
    for domain in ("chat", "maths", "code"):
        written = prompts.write_prompts(domain, 200, seed=1, passages=passages)
        assert written == prompts.write_prompts(domain, 200, seed=1, passages=passages)
        assert written != prompts.write_prompts(domain, 200, seed=2, passages=passages)
        assert len({p.text for p in written}) == 200
        assert {p.domain for p in written} == {domain}
        assert not any("{" in p.text and "}" in p.text and domain != "code" for p in written)
        assert not any(guard.is_evaluation(p.text) for p in written)
    assert not any("Paragraph" in p.text for p in prompts.write_prompts("chat", 200, seed=1))


def test_slots_are_drawn_once() -> None:
    text = prompts.fill("{name} {name} {name2}", prompts.Rng(3))
    first, again, other = text.split()
    assert first == again != other


def test_a_second_round_leans_on_the_answers_of_the_first() -> None:
    story = "Once upon a time a fox met a crow beside the quiet river. " * 8
    spoken = [(Prompt((("user", f"Tell me story {i}."),), "chat"), f"{i}: {story}") for i in range(5)]
    spoken += [(Prompt((("user", f"What is {i} + 2?"),), "maths"), f"The answer is {i + 2}.") for i in range(5)]
    made = follow_prompts(spoken, 60)
    assert made == follow_prompts(spoken, 60) != follow_prompts(spoken, 60, seed=1)
    assert len({prompt.text for prompt in made}) == len(made) == 60
    turns = [prompt for prompt in made if len(prompt.messages) > 1]
    assert {prompt.domain for prompt in turns} == {"chat", "maths"}
    for prompt in turns:
        (asked,) = (was for was, text in spoken if prompt.messages[1] == ("assistant", text))
        assert (prompt.messages[0], prompt.domain) == (asked.messages[0], asked.domain)
        assert [role for role, _ in prompt.messages] == ["user", "assistant", "user"]
    about = [prompt for prompt in made if len(prompt.messages) == 1]
    assert about
    assert all(story.strip() in prompt.text and prompt.domain == "chat" for prompt in about)
    assert follow_prompts(spoken[5:], 60) == []  # nothing long enough to stand for a text


def test_no_evaluation_prompt_comes_back_as_a_second_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    known = frozenset(guard.fingerprints(EVALUATED))
    monkeypatch.setattr(guard, "evaluation_hashes", lambda: known)
    spoken = [(Prompt((("user", "Ask me something."),)), EVALUATED + " " + "Sheep graze. " * 60)]
    assert follow_prompts(spoken, 20) == []


def test_held_out_prompts_depend_on_their_text_alone() -> None:
    many = [Prompt((("user", f"prompt {i}"),)) for i in range(800)]
    held = [p for p in many if is_held_out(p, 8)]
    assert 60 < len(held) < 140
    assert held == [p for p in reversed(many) if is_held_out(p, 8)][::-1]


def test_invented_texts_are_sorted_and_sifted() -> None:
    assert domain_of("Write a Python function that adds.") == "code"
    assert domain_of("How many eggs are 3 dozen?") == "maths"
    assert domain_of("Tell me about Rome.") == "chat"
    assert usable("Tell me about Rome.")
    assert not usable("Hi")
    assert not usable("again and " * 20)
    assert not usable("broken \ufffd text here")


def test_the_script_that_hashes_explains_itself_and_asks_for_its_data() -> None:
    script = Path(__file__).parents[2] / "scripts" / "hash_evaluation.py"
    environment = {name: value for name, value in os.environ.items() if name != "OUTRIDER_DATA"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    assert run("--help").returncode == 0
    assert run().stderr == "OUTRIDER_DATA is not set; name the folder that holds the evaluation prompts\n"
