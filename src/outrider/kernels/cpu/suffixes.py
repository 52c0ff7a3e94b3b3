"""A suffix automaton in flat arrays: growing it, following a text through it, and the likeliest way on.

The same construction, state by state and edge by edge, as drafters/automaton.py, which explains it and which tests hold
it to. `states` [n, 5] and `edges` [m, 4] are int32 rows; a state's edges are a list in the order they were made, and
`table` (a power of two of slots) finds one by its state and token: edge + 1, 0 where empty. Nothing is ever removed.
"""

from __future__ import annotations

import numpy as np
from numba import njit

LINK, LENGTH, COUNT, FIRST, LAST = range(5)  # columns of states; FIRST and LAST are edges, -1: none
OWNER, TOKEN, TARGET, NEXT = range(4)  # columns of edges
STATES, EDGES, CURRENT, FULL = range(4)  # places of meta: how many there are, where the text is, whether room ran out

_COUNTED = 64  # suffixes per token whose count is raised, as in drafters/automaton.py


@njit(cache=True, nogil=True, inline="always")
def _slot(table, edges, state, token):
    """Where the edge of a state by a token is in the table, or would be."""
    mask = len(table) - 1
    mixed = np.uint64(state) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    at = np.int64((mixed ^ (mixed >> np.uint64(29))) >> np.uint64(7)) & mask
    while table[at] != 0:
        edge = table[at] - 1
        if edges[edge, OWNER] == state and edges[edge, TOKEN] == token:
            break
        at = (at + 1) & mask
    return at


@njit(cache=True, nogil=True, inline="always")
def _edge(table, edges, state, token):
    """The edge of a state by a token; -1: none."""
    return table[_slot(table, edges, state, token)] - 1


@njit(cache=True, nogil=True)
def _connect(states, edges, table, meta, state, token, target):
    """Add an edge behind those that the state has."""
    edge = meta[EDGES]
    if edge >= len(edges):
        meta[FULL] = 1
        return
    meta[EDGES] += 1
    edges[edge, OWNER], edges[edge, TOKEN], edges[edge, TARGET], edges[edge, NEXT] = state, token, target, -1
    table[_slot(table, edges, state, token)] = edge + 1
    if states[state, FIRST] < 0:
        states[state, FIRST] = edge
    else:
        edges[states[state, LAST], NEXT] = edge
    states[state, LAST] = edge


@njit(cache=True, nogil=True)
def _new(states, meta, length, link, count):
    """A state without edges."""
    state = meta[STATES]
    if state >= len(states):
        meta[FULL] = 1
        return np.int64(0)
    meta[STATES] += 1
    states[state, LINK], states[state, LENGTH], states[state, COUNT] = link, length, count
    states[state, FIRST] = states[state, LAST] = -1
    return state


@njit(cache=True, nogil=True)
def _clone(states, edges, table, meta, state, token, following):
    """Split off the shorter substrings of `following`, those that also end elsewhere."""
    clone = _new(states, meta, states[state, LENGTH] + 1, states[following, LINK], states[following, COUNT])
    edge = states[following, FIRST]
    while edge >= 0:
        _connect(states, edges, table, meta, clone, edges[edge, TOKEN], edges[edge, TARGET])
        edge = edges[edge, NEXT]
    while state != -1:
        edge = _edge(table, edges, state, token)
        if edge < 0 or edges[edge, TARGET] != following:
            break
        edges[edge, TARGET] = clone
        state = np.int64(states[state, LINK])
    states[following, LINK] = clone
    return clone


@njit(cache=True, nogil=True)
def _append(states, edges, table, meta, token):
    """One more token of the current text; its state."""
    last = meta[CURRENT]
    edge = _edge(table, edges, last, token)
    if edge >= 0:  # only where several texts share a beginning
        following = np.int64(edges[edge, TARGET])
        if states[following, LENGTH] == states[last, LENGTH] + 1:
            return following
        return _clone(states, edges, table, meta, last, token, following)
    state = _new(states, meta, states[last, LENGTH] + 1, 0, 0)
    while last != -1:
        edge = _edge(table, edges, last, token)
        if edge >= 0:
            following = np.int64(edges[edge, TARGET])
            exact = states[following, LENGTH] == states[last, LENGTH] + 1
            states[state, LINK] = following if exact else _clone(states, edges, table, meta, last, token, following)
            break
        _connect(states, edges, table, meta, last, token, state)
        last = np.int64(states[last, LINK])
    return state


@njit(cache=True, nogil=True)
def extend(states, edges, table, meta, tokens):
    """Append tokens to the current text, and count it and its suffixes at every one of them."""
    for i in range(len(tokens)):
        state = _append(states, edges, table, meta, np.int64(tokens[i]))
        if meta[FULL]:
            return
        meta[CURRENT] = state
        for _ in range(_COUNTED):
            if state == 0:
                break
            states[state, COUNT] += 1
            state = np.int64(states[state, LINK])


@njit(cache=True, nogil=True)
def settle(states, state, length):
    """The state that stands for a matched string now: clones may have taken over the shorter ones."""
    while state != 0 and length <= states[states[state, LINK], LENGTH]:
        state = np.int64(states[state, LINK])
    return state


@njit(cache=True, nogil=True)
def follow(states, edges, table, state, length, tokens):
    """(state, length) of the longest suffix of a matched string and the tokens behind it that occurs."""
    for i in range(len(tokens)):
        token = np.int64(tokens[i])
        state = settle(states, state, length)
        edge = _edge(table, edges, state, token)
        while state != 0 and edge < 0:
            state = np.int64(states[state, LINK])
            length = np.int64(states[state, LENGTH])
            edge = _edge(table, edges, state, token)
        if edge < 0:
            state, length = np.int64(0), np.int64(0)
        else:
            state, length = np.int64(edges[edge, TARGET]), length + 1
    return state, length


@njit(cache=True, nogil=True)
def descend(states, edges, state, tokens, shares):
    """Fill in what followed a state most often, and each token's share of what followed there; how many there are."""
    for depth in range(len(tokens)):
        best, total, chosen = 0, 0, -1
        edge = states[state, FIRST]
        while edge >= 0:
            count = states[edges[edge, TARGET], COUNT]
            total += count
            if count >= best:  # of equals the latest found is the most recent
                best, chosen = count, edge
            edge = edges[edge, NEXT]
        if chosen < 0:
            return depth
        tokens[depth], shares[depth] = edges[chosen, TOKEN], best / total
        state = edges[chosen, TARGET]
    return len(tokens)


@njit(cache=True, nogil=True)
def rehash(edges, count, table):
    """Enter all edges into an empty table."""
    for edge in range(count):
        table[_slot(table, edges, edges[edge, OWNER], edges[edge, TOKEN])] = edge + 1
