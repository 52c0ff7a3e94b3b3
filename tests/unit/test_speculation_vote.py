"""Votes: prefix trees, the published majority, and hedge; each learns whom to believe and gives up whom it should."""

from __future__ import annotations

from itertools import pairwise

import pytest

from outrider.errors import ConfigError
from outrider.speculation.hedge import HedgeRules, HedgeVote
from outrider.speculation.prefix_tree import PrefixTree
from outrider.speculation.trial import agreement, depth, head, subset
from outrider.speculation.vote import ANY_DEPTH, MajorityRules, MajorityVote, NoVote
from outrider.types import NO_DRAFT, Draft
from trials import chain, voted


def vote_of(vote, *drafts, sequence_id=0):
    return vote.merge(sequence_id, {draft.drafter: draft for draft in drafts})


# --- the prefix tree -----------------------------------------------------------------------------------------------


def test_weights_add_up_along_shared_prefixes():
    """Two light drafters that agree outweigh a heavy one, and the descent ends where one of them ended."""
    tree = PrefixTree()
    tree.insert(chain("heavy", 9, 9, 9), 1.5)
    tree.insert(chain("a", 1, 2, 3), 1.0)
    tree.insert(chain("b", 1, 2, 4, 5), 0.9)
    winner = tree.heaviest_chain()
    assert winner.tokens == (1, 2, 3)
    assert winner.drafter == "a"


def test_the_descent_is_greedy_not_best_leaf():
    tree = PrefixTree()
    tree.insert(chain("a", 1, 2), 1.0)
    tree.insert(chain("b", 1, 3), 1.0)
    tree.insert(chain("c", 5, 6), 1.9)
    assert tree.heaviest_chain().tokens == (1, 2)


def test_ties_go_to_the_earlier_drafter():
    tree = PrefixTree()
    tree.insert(chain("a", 1), 1.0)
    tree.insert(chain("b", 2), 1.0)
    assert tree.heaviest_chain().drafter == "a"


def test_an_empty_tree_gives_no_draft():
    assert PrefixTree().heaviest_chain() == NO_DRAFT


def test_the_runner_up_is_a_branch_behind_the_chain():
    tree = PrefixTree()
    tree.insert(chain("a", 1, 2, 3), 1.0)
    tree.insert(chain("b", 1, 7, 8), 0.6)
    tree.insert(chain("c", 5), 0.5)
    both = tree.runner_up()
    assert both.tokens == (1, 2, 3, 7, 8)
    assert both.parents == (-1, 0, 1, 0, 3)
    assert both.drafter == "a"


def test_without_a_rival_the_runner_up_is_the_chain():
    tree = PrefixTree()
    tree.insert(chain("a", 1, 2), 1.0)
    assert tree.runner_up() == chain("a", 1, 2)


def test_siblings_share_their_confidence():
    tree = PrefixTree()
    tree.insert(chain("a", 1, confidence=(0.8,)), 1.0, trust=True)
    tree.insert(chain("b", 2, confidence=(0.8,)), 0.9, trust=True)
    assert tree.runner_up().confidence == pytest.approx((0.5, 0.5))


def test_trust_lets_a_confident_drafter_win():
    for trust, winner in ((False, "light-headed"), (True, "sure")):
        tree = PrefixTree()
        tree.insert(chain("light-headed", 1, confidence=(0.1,)), 1.0, trust)
        tree.insert(chain("sure", 2, confidence=(0.9,)), 0.5, trust)
        assert tree.heaviest_chain().drafter == winner


# --- helpers on drafts ---------------------------------------------------------------------------------------------


def test_agreement_of_chains_and_trees():
    assert agreement(chain("a", 1, 2, 3), (1, 2, 9)) == 2
    assert agreement(chain("a", 1), (1, 2, 3)) == 1
    assert agreement(NO_DRAFT, (1,)) == 0
    tree = Draft((5, 1, 2, 3), (-1, -1, 1, 1))
    assert agreement(tree, (1, 3, 4)) == 2
    assert agreement(tree, (6,)) == 0
    assert depth(tree) == 2


def test_parts_of_drafts_keep_their_shape():
    tree = Draft((5, 1, 2, 3), (-1, -1, 1, 1), confidence=(0.1, 0.8, 0.5, 0.4))
    assert head(tree, 2) == Draft((5, 1), (-1, -1), confidence=(0.1, 0.8))
    assert subset(tree, [1, 3]) == Draft((1, 3), (-1, 0), confidence=(0.8, 0.4))
    assert subset(chain("a", 1, 2, 3), [0, 1]) == chain("a", 1, 2)


# --- policies ------------------------------------------------------------------------------------------------------


def test_no_vote_takes_the_first_idea():
    vote = NoVote(["a", "b"])
    assert vote_of(vote, Draft(drafter="a"), chain("b", 2)).drafter == "b"
    assert vote.reach(0, "b", earlier=True) == 0
    assert vote.reach(0, "b", earlier=False) == ANY_DEPTH


def test_a_lone_proposal_passes_through_untouched():
    tree = Draft((1, 2), (-1, -1), drafter="a")
    for vote in (MajorityVote(["a", "b"]), HedgeVote(["a", "b"])):
        assert vote_of(vote, tree, Draft(drafter="b")) is tree
        assert vote_of(vote, Draft(drafter="a"), Draft(drafter="b")) == NO_DRAFT


def test_voted_drafts_are_point_masses():
    import numpy as np

    sampled = Draft((1, 2), probs=np.full((2, 9), 1 / 9), drafter="a")
    for vote in (MajorityVote(["a", "b"]), HedgeVote(["a", "b"])):
        merged = vote_of(vote, sampled, chain("b", 3))
        assert merged.tokens
        assert merged.probs is None


def test_majority_rewards_and_punishes_only_the_winner():
    vote = MajorityVote(["a", "b", "c"], MajorityRules(reward=1.1, penalty=0.5))
    a, b, c = chain("a", 1, 2), chain("b", 1, 2), chain("c", 3, 4)
    vote.observe([voted([a, b, c], (7,), a)])
    shares = vote.weights()
    assert shares["a"] == pytest.approx(0.5 * shares["b"])
    assert shares["b"] == shares["c"]
    vote.observe([voted([a, b, c], (3, 4, 5), c)])
    assert vote.weights()["c"] == pytest.approx(1.1 * vote.weights()["b"])


def test_majority_judges_the_mean_over_the_requests_won():
    vote = MajorityVote(["a", "b"], MajorityRules(threshold=0.5))
    a = chain("a", 1, 2)
    vote.observe([voted([a], (1, 2, 3), a, 0), voted([a], (1, 9), a, 1), voted([a], (9,), a, 2)])
    assert vote.weights()["a"] > 0.5


def test_majority_weights_have_a_floor():
    vote = MajorityVote(["a", "b"], MajorityRules(penalty=0.5, floor=0.1))
    a = chain("a", 1)
    for _ in range(50):
        vote.observe([voted([a], (2,), a)])
    assert vote.weights()["a"] == pytest.approx(0.1 / 1.1)


def test_hedge_scores_losers_too():
    """The loser was right where the winner was wrong; majority would leave its weight alone."""
    vote = HedgeVote(["a", "b", "c"])
    a, b, c = chain("a", 1, 2), chain("b", 7, 8), chain("c", 1, 3)
    before = vote.shares(0)
    vote.observe([voted([a, b, c], (7,), a)])
    after = vote.shares(0)
    assert after["b"] > before["b"]
    assert after["a"] < before["a"]
    assert after["c"] < before["c"]


def test_hedge_trusts_different_drafters_on_different_requests():
    vote = HedgeVote(["code", "chat"])
    for _ in range(20):
        code, chat = chain("code", 1, 2, 3), chain("chat", 4, 5, 6)
        vote.observe([voted([code, chat], (1, 2, 3, 9), code, 0), voted([code, chat], (4, 5, 6, 9), code, 1)])
    assert vote.shares(0)["code"] > 0.9
    assert vote.shares(1)["chat"] > 0.9
    assert vote.weights()["code"] == pytest.approx(0.5, abs=0.1)
    assert vote_of(vote, code, chat, sequence_id=1).drafter == "chat"


def test_hedge_starts_new_requests_from_the_global_prior():
    vote = HedgeVote(["good", "bad"])
    for sequence_id in range(40):
        good, bad = chain("good", 1, 2, 3), chain("bad", 4, 5, 6)
        vote.observe([voted([good, bad], (1, 2, 3, 9), good, sequence_id)])
        vote.forget(sequence_id)
    assert vote.shares(99)["good"] > 0.7
    vote.forget(99)
    assert not vote._requests


def test_a_sleeping_drafter_keeps_its_weight():
    vote = HedgeVote(["lookup", "a", "b"])
    for _ in range(10):
        vote.observe([voted([Draft(drafter="lookup"), chain("a", 1), chain("b", 2)], (1, 5), chain("a", 1))])
    request = vote._requests[0]
    assert request["lookup"].score == 0.0
    assert request["a"].score > 0 > request["b"].score


def test_a_dead_drafter_stops_and_is_probed_ever_more_seldom():
    rules = HedgeRules(first_probe=4, last_probe=16)
    vote = HedgeVote(["good", "bad"], rules)
    good, bad = chain("good", 1, 2, 3), chain("bad", 4, 5, 6)
    for _ in range(30):
        vote.observe([voted([good, bad], (1, 2, 3, 9), good)])
    asked = [vote.reach(0, "bad", False) for _ in range(100)]
    probes = [i for i, reach in enumerate(asked) if reach]
    assert set(asked) == {0, rules.probe_depth}
    assert [b - a for a, b in pairwise(probes)][:5] == [8, 16, 16, 16, 16]
    assert vote.reach(0, "good", False) == ANY_DEPTH


def test_an_outvoted_drafter_drafts_where_nobody_else_has_an_idea():
    vote = HedgeVote(["lookup", "head"])
    lookup, head_ = chain("lookup", 1, 2, 3, 4, 5, 6), chain("head", 1, 9)
    for _ in range(30):
        vote.observe([voted([lookup, head_], (1, 2, 3, 4, 5, 6, 7), lookup)])
    assert vote.shares(0)["head"] < HedgeRules().floor
    assert vote.reach(0, "head", True) == 0
    assert vote.reach(0, "head", False) == ANY_DEPTH


def test_a_drafter_that_turns_good_comes_back():
    vote = HedgeVote(["good", "bad"], HedgeRules(first_probe=4, last_probe=16))
    good, bad = chain("good", 1, 2, 3), chain("bad", 4, 5, 6)
    for _ in range(30):
        vote.observe([voted([good, bad], (1, 2, 3, 9), good)])
    for rounds in range(400):  # noqa: B007
        reach = vote.reach(0, "bad", False)
        if reach == ANY_DEPTH:
            break
        asked = [good, head(bad, reach)] if reach else [good]
        vote.observe([voted(asked, (4, 5, 6, 9), good)])
    assert rounds < 300


@pytest.mark.parametrize(
    "options", [{"rate": 0}, {"memory": 0}, {"floor": 0.6}, {"branches": 3}, {"first_probe": 9, "last_probe": 3}]
)
def test_wrong_hedge_rules_are_refused(options):
    from outrider.errors import ConfigError

    with pytest.raises(ConfigError):
        HedgeRules(**options)


@pytest.mark.parametrize("name", ["useless", "rate", "prior_rate"])
def test_a_setting_that_is_no_number_is_refused(name):
    with pytest.raises(ConfigError, match=name):
        HedgeRules(**{name: float("nan")})
