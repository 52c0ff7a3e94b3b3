"""Whatever is drafted, the seeded text is bitwise the text without drafts: chains, trees, all sampling parameters."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from judging import plain_text, sampler_for, speculate, stopper_for
from outrider.types import Draft, SamplingParams
from scripted import random_logits

V = 12
PROMPT = [3, 1, 3]
PENALTY = st.sampled_from([-2.0, -0.5, 0.0, 0.7, 2.0])


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    """Any combination of what changes a distribution or ends a text."""
    tokens = st.lists(st.integers(0, V - 1), max_size=3, unique=True)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 1, 4, V])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.4])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        repetition_penalty=draw(st.sampled_from([0.8, 1.0, 1.5])),
        presence_penalty=draw(PENALTY),
        frequency_penalty=draw(PENALTY),
        logit_bias=dict.fromkeys(draw(tokens), draw(st.sampled_from([-100.0, 1.5]))),
        banned_token_ids=draw(tokens),
        min_tokens=draw(st.sampled_from([0, 5])),
        max_tokens=draw(st.integers(5, 14)),
        stop=draw(st.sampled_from([None, "ab", ["c", "dd"]])),
        stop_token_ids=draw(tokens),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0, 2])),
    )


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...] | None:
    """The parents of a tree, or None for a chain."""
    if draw(st.booleans()):
        return None
    return tuple(draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, 8))))


@settings(max_examples=100, deadline=None)
@given(params=parameters(), parents=shapes(), seed=st.integers(0, 2**40), noise=st.integers(0, 5), data=st.data())
def test_the_seeded_text_does_not_depend_on_drafts(params, parents, seed, noise, data) -> None:
    script = random_logits(V, seed=noise, spread=2.0)
    options = {"vocab_size": V, "seed": seed}
    wanted, finish = plain_text(script, PROMPT, sampler_for(params, PROMPT, **options), stopper_for(params, V), V)
    size = data.draw(st.integers(0, 5)) if parents is None else len(parents)
    random = data.draw(st.randoms(use_true_random=False))

    def guess(known: list[int]) -> Draft:
        """Now the true continuation, now anything, now past the end."""
        done = len(known) - len(PROMPT)
        tree = Draft((0,) * size, parents)
        depths = [len(tree.path(node)) - 1 for node in range(size)]
        right = [wanted[done + depth] if done + depth < len(wanted) else 0 for depth in depths]
        return Draft(tuple(t if random.random() < 0.7 else random.randrange(V + 2) for t in right), parents)

    spoken = speculate(script, PROMPT, sampler_for(params, PROMPT, **options), stopper_for(params, V), guess, V)
    assert spoken.tokens == wanted
    assert spoken.finish == finish
    logprobs = [entry.token for verdict in spoken.verdicts for entry in verdict.logprobs]
    assert logprobs == (wanted if params.logprobs is not None else [])


def test_the_drafts_of_this_file_are_accepted_and_turned_down() -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    script = random_logits(V, seed=1)
    wanted, _ = plain_text(script, PROMPT, sampler_for(params, PROMPT, V), stopper_for(params, V), V)

    def guess(known: list[int]) -> Draft:
        done = len(known) - len(PROMPT)
        return Draft((*wanted[done : done + 2], 0, 0, 0), drafter="half")

    spoken = speculate(script, PROMPT, sampler_for(params, PROMPT, V), stopper_for(params, V), guess, V)
    assert spoken.tokens == wanted
    assert spoken.drafted > spoken.accepted > 20
    assert spoken.corrected > 5
