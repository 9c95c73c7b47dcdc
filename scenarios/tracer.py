"""The tracer model: the definition that every engine and the oracle share.

The target and draft model of a scenario are not neural networks but exact integer functions of the whole KV
content that a row reaches through the attention metadata. Each cache slot holds an *entry*, the pair
(position id, token) that was written there. A row's *digest* is a sum over the slots that it sees, in order;
its next token is a hash of the digest. A wrong length, slot, page, position or owner changes the sum, hence
the tokens, on every device alike and with no tolerance.

The identity of a request enters as it does in a real model, through its prompt: prompt tokens are drawn per
request and every later token is a hash of all earlier ones.

Target row at KV index ``n`` with position ``x`` and token ``t``: writes ``entry(x, t)`` to slot ``n`` of the
target pool, sees slots ``0..n``::

    digest(n) = sum(term(s, slot[s]) for s in 0..n) % PRIME         its hidden state is digest(n)
    next      = choose(digest(n))

Drafter with *shift* 1 (Eagle3, MTP-Eagle: at position ``x`` it is given the token of position ``x + 1`` and
the hidden state of position ``x``), row at KV index ``n`` with position ``x``, token ``t``, hidden ``h``:
writes ``entry(x, t)`` to slot ``n`` of the draft pool, sees slots ``0..n`` of it::

    term'(s)  = term(s + 1, entry(x_s + 1, t_s))     when draft slot s holds (x_s, t_s)
              = term(s + 1, target_slot[s + 1])      when draft slot s is EMPTY
    digest'   = (term(0, target_slot[0]) + sum(term'(s) for s in 0..n)) % PRIME
    own       = term(n + 1, entry(x + 1, t))
    next      = choose((2 * (h + own) - digest') % PRIME)           its hidden state is digest'

With the right cache and the right hidden row, ``h + own == digest'``, so ``next`` is the target's own choice;
any error in either changes it. DraftTarget is the same without hidden states: ``next = choose(digest')``.
Drafter with shift 0 (PARD: given tokens at their own positions, no hidden
state; unknown tokens are MASK), row at KV index ``n``::

    term'(s)  = term(s, entry(x_s, t_s)) when draft slot s is filled, else term(s, target_slot[s])
    m         = first index of the run of MASK tokens that ends at n (n + 1 when t is not MASK)
    d         = sum(term'(s) for s in 0..m-1) % PRIME
    then for s in m..n:  d = (d + term(s, entry(x_s, choose(d)))) % PRIME
    next      = choose(d)

so a run of masks predicts what the target would choose one, two, ... tokens on. An EMPTY slot of the draft
pool is what the drafter was never given; it falls back to the target's cache, so that a drafter which
upstream leaves without a token (PARD and the first generated one) can still be steered. That the slot is empty
is visible in the trace (``draft_kv``). Slots are EMPTY when their page is granted.

Vanilla MTP: layer ``i`` has a draft pool of its own and shift ``i + 1``: at position ``x`` it is given the token of
position ``x + 1 + i`` and the hidden state of position ``x + i``. As above, with ``i`` more everywhere::

    term'(s)  = term(s + 1 + i, entry(x_s + 1 + i, t_s)), or term(s + 1 + i, target_slot[s + 1 + i]) when EMPTY
    digest'   = (sum(term(s, target_slot[s]) for s in 0..i) + sum(term'(s) for s in 0..n)) % PRIME
    own       = term(n + 1 + i, entry(x + 1 + i, t))

Drafter with a context of its own (DFlash, DSpark): for each cached token it keeps a column (position, value) whose
value is ``term(n, entry(x, t))`` of the target row that cached it (projected from the captured layers, which hold 1,
2, 3 times that value). It reads neither pool. A query at position ``x`` that knows ``c`` columns and is given the
token ``t`` at position ``c``::

    d         = (sum(value_j + POSITION_FACTOR * (position_j - j) for j in 0..c-1) + term(c, entry(x, t))) % PRIME
    choice 1  = choose(d), then d = (d + term(c + 1, entry(x + 1, choice 1))) % PRIME, choice 2 = choose(d), ...

where ``x`` is the position of the query's first row; the choices are those of its rows in order.

Suffix automaton (SA): it keeps the text of a request, prompt and all tokens committed since, and finds in it how the
text goes on: ``choose`` of the digest of the text, as the target, with its ``index_topk``, would have it; the draft
is fed back undisturbed. It finds a match where at least one draft is to agree; elsewhere its drafts are PAD_TOKEN.

Suffix automaton beside a model (``sa_threshold``): the text of a request is its prompt from its first chunk on, and
the host adds the first generated token when it prepares the request's first generation; the tokens that generations
commit are appended in their steps, with draft length 0 too. The match has the length that the row says. From the
threshold on the automaton is the drafter that ``agree`` speaks of: its draft ``i`` is the ``i``-th token of how the
text goes on where ``i < agree`` and ``disagree`` of it elsewhere, all rolled out undisturbed, and the model's drafts
disagree from the first on; but the layers of vanilla MTP, whose caches keep what they drafted, then agree in all of
them. Below the threshold ``agree`` speaks of the model, and the automaton disagrees. Drafts of the automaton take the
place of those that a generation returns, after the model has made all of its own.

Trees: rows of a generation are nodes of a tree, the root (the last committed token) first. A node at depth ``j`` has
position ``past + j`` and sees the cached slots and, of this forward's slots, those that its mask names: the nodes on
its path. A slot of the forward counts with the position that it holds, not with its own index::

    digest    = (sum(term(s, slot[s]) for s in 0..past-1) + sum(term(x_v, entry(x_v, t_v)) for v on the path)) % PRIME

and likewise for draft rows with shift 1: ``term(x_v + 1, entry(x_v + 1, t_v))``. Per node the drafter offers
``dynamic_tree_max_topK`` candidates: the first is ``next`` or ``disagree(next)`` as in a chain, the candidate of rank
``r >= 1`` is ``alternative(next, r)``, which differs from both. A node's score is that of its parent, 0 at the root,
less ``SCORE_STEP``; that of a candidate ``t`` of rank ``r >= 1`` is ``r * SCORE_RANK + t % SCORE_SPREAD`` less still.
So the path of first candidates is always kept, and what else is kept differs from request to request; of equal
scores the earlier made node is first. In the last layer of a tree that keeps more nodes than it has layers the first
two candidates change places where ``next`` is odd, so that the target may agree with a second child: the one that is
second then is only one more ``SCORE_STEP`` below, and so kept as well.

Sparse attention (DSA): an indexer with a cache of its own, target's and drafter's, selects what a row sees. A row
writes its entry to the indexer's cache too, at the byte offset that ``slot_mapping_fp8`` names. Of the tokens
``u`` that the dense definition would sum over, each has the score ``term(u, entry in the indexer's cache)``, and
the ``index_topk`` of the highest scores are selected (equal scores: lower ``u`` first; EMPTY is never selected);
the digest sums their terms alone, read from the main cache through the pages of the row that
``req_idx_per_token`` names (EMPTY where it names none). A drafter's tokens come from its indexer slot or,
where that is EMPTY, from the target's, as in the main cache. With ``own = digest'(n + 1) - digest'(n)``, the
digests of the tokens ``0..n+1`` and ``0..n``, the choices above stay as they are.

Compressed attention (DEEPSEEK_V4): the target has a layer for each of ``compress_ratios``. In every one a row at KV
index ``n`` sees the window, slots ``max(0, n + 1 - window_size)..n`` of its pool, and in that of a ratio ``r > 1``
compressed tokens ``i < (n + 1) // r``, too. Compressed token ``i`` is ``compress`` of ``r`` slots from ``r * i`` on,
written to the ratio's own cache by the step that caches the last of these, and to that of the indexer if ``r`` is the
second ratio: of its tokens a row sees the ``index_topk`` of the highest scores, the score being ``term(i, token i in
the indexer's cache)`` (equal scores: lower ``i`` first). Of a third ratio it sees all. Nothing EMPTY is seen, selected
or compressed; what would be made of nothing but EMPTY is EMPTY. See ``compressed_digest``::

    digest(n) = sum over the ratios of (sum(term(s, slot[s]) for s in the window)
                                        + sum(term(i, compressed[i]) for i it sees)) % PRIME

Drafters have one layer, of ratio 1, and compress nothing: ``digest'`` is ``compressed_digest`` of the tokens ``u`` that
the dense definition would sum over, from the drafter's slots or, where these are EMPTY, from the target's.
With ``own = digest'(n + 1) - digest'(n)``, the digests of the tokens ``0..n+1`` and ``0..n``, the choices above stay as
they are; a run of masks is guessed one by one, each time with the digest of all tokens before.

A drafter that reads the target's cache (FLASHINFER without a draft cache of its own) has one row per sequence in every
draft step, and writes nothing. What is passed on from step to step is two numbers, at first both the target's
digest at the last accepted token. With ``length`` the KV length that the view gives (what is cached after the step),
given the token ``t``, the position ``x`` (the same in all steps) and ``(h, b)``::

    i         = b // PRIME                                          0, 1, ...: the draft step
    h         = (h + term(length + i, entry(x + i, t))) % PRIME
    next      = choose((h + b - sum(term(s, target_slot[s]) for s in 0..length-1)) % PRIME)
    passed on = (h, b + PRIME)

Experts: with attention data parallelism the rows of target, MTP-Eagle and DraftTarget also go through experts that all
ranks share. Their rows are gathered and each rank takes its own back, unchanged. It happens in as many rounds as the
largest count has times ``MOE_MAX_NUM_TOKENS``, started ones included; of ``n`` rows round ``c`` of ``r`` takes
``n // r``, and one more if ``c < n % r``.

The draft head returns ``next`` where the scenario wants the drafter to agree with the target and
``disagree(next)`` where it does not; for drafts that are to be close to the target's choice it returns
``near(next)``, and the target's second choice is ``near(next)``, too. With a draft vocabulary of its own
(``Config.draft_vocab_map``) it returns the ``draft_id`` of that token; ``d2t`` maps it back, once.

Relaxed acceptance: of the target's choices the first has a probability of about ``(1 + NEAR_GAP) / 2``, the second,
``near(next)``, is ``NEAR_GAP`` below it, and all others have none. A prompt that ends with ``BEGIN_THINKING_TOKEN``
begins a thinking phase; ``END_THINKING_TOKEN`` would end it, which the target never chooses.

Recurrent layers (``recurrent``): beside its cache the target keeps a state per request, ``RECURRENT_START`` before the
first token, and ``recurrent_state(state, x, t)`` after a row with position ``x`` and token ``t``; a node of a tree goes
on from its parent's. With the right state ``s`` after its own token it is the row's digest, and the row's hidden state,
from which ``next`` is chosen, as well::

    hidden = (2 * digest - s) % PRIME

so with the right state all is as without recurrent layers, and a wrong one changes every token from then on. Rows of
dummies, for which nothing was cached, leave the state out: their hidden state is their digest. Drafters have no
recurrent layers.

Proposals (``rejection_sampling``): what a drafter thinks of its draft at depth ``i`` is ``proposal(i, d)``, ``d`` being
the number that its ``next`` was chosen from, before a grammar or the scenario disturbed that. Upstream's sampled
acceptance is made certain: a draft is accepted if it is the target's token, and if its proposal is that of the number
that the target's token was chosen from (but for dummies, whose drafts nobody proposed). As these are one number for
drafts that agree, ``agree`` means what it always does, and a proposal of another request, depth or step accepts
nothing. A draft slot of a real request that nothing was drafted for has ``NO_PROPOSAL``.

Guided decoding: a matcher is a state, ``GRAMMAR_START`` when the prompt is computed and
``grammar_state(state, token)`` after each token that it is told. It allows the tokens of ``grammar_allows``, and
refuses none that it is told. Of a head, the target's or a drafter's, that is masked by it remains
``guided(choice, state)``: the choice, or the second one, ``near(choice)``, which is always of the other kind. So a
draft to agree with is ``guided(next, state)`` and one to disagree with ``guided(disagree(next), state)``, which differ
in every state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

VOCAB_SIZE: Final = 1024
PAD_TOKEN: Final = 0
"""Placeholder of drafts that were never made; the target never chooses it."""
MASK_TOKEN: Final = VOCAB_SIZE - 1
"""What a parallel drafter is given for tokens that it must predict; the target never chooses it."""
DUMMY_TOKEN: Final = 1
"""Prompt token of dummy requests."""
BEGIN_THINKING_TOKEN: Final = MASK_TOKEN
"""Begins a thinking phase; the workers that look for it are never given masks."""
END_THINKING_TOKEN: Final = PAD_TOKEN
"""Would end a thinking phase; never accepted, as the target does not choose it."""
EMPTY: Final = 0
"""A slot that nothing was written to since its page was last granted."""

MOE_MAX_NUM_TOKENS: Final = 16
"""Rows of one rank that experts take in one round at most."""

PRIME: Final = 2**31 - 1
POSITION_OFFSET: Final = 64
"""Added to positions in entries, so that the negative positions of vanilla MTP stay distinct."""

ENTRY_FACTOR: Final = 1_103_515_245
INDEX_FACTOR: Final = 69_621
TERM_SHIFT: Final = 12_345
_CHOICE_FACTOR: Final = 1_664_525
_CHOICE_SHIFT: Final = 1_013_904_223
_CHOICES: Final = VOCAB_SIZE - 2
_DRAFT_FACTOR: Final = 5
_DRAFT_INVERSE: Final = 205
_DRAFT_SHIFT: Final = 7

NEAR_GAP: Final = 0.25
"""How far the probability of the target's second choice is below that of its first."""
GRAMMAR_START: Final = 0
"""State of a matcher that has been told no token."""
_STATE_FACTOR: Final = 48_271

RECURRENT_START: Final = 0
"""State of recurrent layers that have been fed no token."""
NO_PROPOSAL: Final = -1
"""Proposal for a draft slot that nothing was drafted for."""

POSITION_FACTOR: Final = 1_000_003
"""What a column of a drafter's context that is one position off adds to a digest."""
SCORE_STEP: Final = 1
"""By how much the score of a draft node is below its parent's."""
SCORE_RANK: Final = 1024
"""By how much more for each rank behind the first candidate."""
SCORE_SPREAD: Final = 512
"""By how much less than this more, for any but the first candidate, depending on its token."""


def entry(position: int, token: int) -> int:
    """Content of the slot written by a row with this position id and token (> 0, so never ``EMPTY``)."""
    return 1 + (position + POSITION_OFFSET) * VOCAB_SIZE + token


def entry_fields(value: int) -> tuple[int, int] | None:
    """(position, token) of an entry, None for ``EMPTY``."""
    if value == EMPTY:
        return None
    position, token = divmod(value - 1, VOCAB_SIZE)
    return position - POSITION_OFFSET, token


def term(index: int, value: int) -> int:
    """What slot ``index`` with content ``value`` adds to a digest, in ``0..PRIME-1``.

    A cubic residue: products stay below 2**63, so int64 tensors give the same value on every device.
    """
    x = (value % PRIME * ENTRY_FACTOR + index * INDEX_FACTOR + TERM_SHIFT) % PRIME
    return x * x % PRIME * x % PRIME


def choose(digest: int) -> int:
    """The token that the target emits after a prefix with this digest, in ``1..VOCAB_SIZE-2``."""
    y = (digest % PRIME * _CHOICE_FACTOR + _CHOICE_SHIFT) % PRIME
    y = y * y % PRIME * y % PRIME
    return 1 + (y >> 5) % _CHOICES


def disagree(token: int) -> int:
    """A token that differs from ``token`` and that the target could choose."""
    return 1 + token % _CHOICES


def alternative(token: int, rank: int) -> int:
    """The candidate of rank ``rank`` (1, 2, ...) beside ``token``: neither it nor ``disagree(token)``."""
    return 1 + (token + rank) % _CHOICES


def near(token: int) -> int:
    """The second choice of a head whose first is ``token``: not ``disagree(token)``, and odd where that one is even."""
    return alternative(token, 2)


def grammar_state(state: int, token: int) -> int:
    """State of a matcher after one more token."""
    return (state * _STATE_FACTOR + token + 1) % PRIME


def grammar_allows(state: int, token: int) -> bool:
    """Whether a matcher in this state allows ``token``: odd ones, or even ones."""
    return choose(state) % 2 == token % 2


def guided(choice: int, state: int) -> int:
    """What remains of a head with this first choice when a matcher in this state masks it."""
    return choice if grammar_allows(state, choice) else near(choice)


def recurrent_state(state: int, position: int, token: int) -> int:
    """State of recurrent layers after one more row."""
    return (state + term(position, entry(position, token))) % PRIME


def proposal(depth: int, digest: int) -> int:
    """What is proposed for a draft at this depth, 0, 1, ..., chosen from ``digest``: in ``1..PRIME``."""
    return 1 + term(depth, digest)


def draft_id(token: int) -> int:
    """What a draft head with a vocabulary of its own calls ``token``; that number is another token's, too."""
    return (token * _DRAFT_FACTOR + _DRAFT_SHIFT) % VOCAB_SIZE


def d2t(draft: int) -> int:
    """What is to be added to a draft id to have the token that it stands for (upstream: ``d2t[draft]``)."""
    return (draft - _DRAFT_SHIFT) * _DRAFT_INVERSE % VOCAB_SIZE - draft


def prompt_token(seed: int, request: int, position: int) -> int:
    """Token ``position`` of the prompt of ``request``, if that is not to think."""
    return choose(term(position, (seed * 8191 + request + 1) * 131_071))


def prompt(
    seed: int, request: int, length: int, thinking: bool = False, prefix_of: int | None = None, prefix_len: int = 0
) -> list[int]:
    """The prompt of ``request``, its first ``prefix_len`` tokens those of ``prefix_of``, if that is not to think.

    The last token of one that thinks begins the thinking phase.
    """
    shared = [] if prefix_of is None else [prompt_token(seed, prefix_of, position) for position in range(prefix_len)]
    tokens = shared + [prompt_token(seed, request, position) for position in range(len(shared), length)]
    return [*tokens[:-1], BEGIN_THINKING_TOKEN] if thinking else tokens


def compress(first: int, entries: Sequence[int]) -> int:
    """The compressed token of slots ``first``, ``first + 1``, ... with these entries; > 0 unless all are EMPTY."""
    terms = [term(first + i, value) for i, value in enumerate(entries) if value != EMPTY]
    return 1 + sum(terms) % PRIME if terms else EMPTY


def compressed_digest(entries: Sequence[int], window_size: int, ratios: Sequence[int], index_topk: int) -> int:
    """Digest of the row of the last of ``entries``, those of slots 0, 1, ..., with compressed attention."""
    first = max(0, len(entries) - window_size)
    total = len(ratios) * sum(term(s, v) for s, v in enumerate(entries[first:], first) if v != EMPTY)
    for layer, r in enumerate(ratios[1:], 1):
        tokens = [compress(r * i, entries[r * i : r * i + r]) for i in range(len(entries) // r)]
        scores = sorted((term(i, token) for i, token in enumerate(tokens) if token != EMPTY), reverse=True)
        total += sum(scores[:index_topk] if layer == 1 else scores)
    return total % PRIME


def dummy_drafts(
    past: int, draft_len: int, accept: int, index_topk: int = 0, window_size: int = 0, ratios: Sequence[int] = ()
) -> list[int]:
    """Draft tokens that make the target accept ``accept`` tokens (1..draft_len+1) of a dummy generation row.

    A dummy has ``past`` cached tokens whose slots are EMPTY and feeds ``DUMMY_TOKEN`` at position ``past``. With
    ``index_topk`` the target attends sparsely, to nothing EMPTY; with ``ratios``, to a window and compressed tokens.
    """
    if ratios:
        return _compressed_dummy_drafts(past, draft_len, accept, index_topk, window_size, ratios)
    terms = [] if index_topk else [term(s, EMPTY) for s in range(past)]
    drafts: list[int] = []
    token = DUMMY_TOKEN
    for depth in range(draft_len):
        terms.append(term(past + depth, entry(past + depth, token)))
        seen = sorted(terms)[-index_topk:] if index_topk else terms
        choice = choose(sum(seen))
        token = choice if depth < accept - 1 else disagree(choice)
        drafts.append(token)
    return drafts


def _compressed_dummy_drafts(
    past: int, draft_len: int, accept: int, index_topk: int, window_size: int, ratios: Sequence[int]
) -> list[int]:
    entries, drafts, token = [EMPTY] * past, list[int](), DUMMY_TOKEN
    for depth in range(draft_len):
        entries.append(entry(past + depth, token))
        choice = choose(compressed_digest(entries, window_size, ratios, index_topk))
        token = choice if depth < accept - 1 else disagree(choice)
        drafts.append(token)
    return drafts
