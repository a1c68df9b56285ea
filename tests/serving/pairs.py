"""Tiny random pairs of models, with everything the engine is made of and nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from drafters.autoregressive import Autoregressive, DrafterParams
from drafters.blind import Blind
from drafters.lookup_first import LookupFirst, model_in
from drafters.mesh import Topology
from drafters.ngram import Ngram
from drafters.shapes import TransformerShape
from drafters.tokenizers import Piece, Tokenizer
from drafters.transformer import abstract_params
from serving import prefill
from serving.decode import Prompt, decode
from serving.pair import Pair
from serving.sampling import SamplingParams, make_warp
from serving.speculation import Engine, Requests, Weights

# Text pieces on which stop strings and characters can be split, an end token, and padding behind.
PIECES = [
    *(bytes([byte]) for byte in b"abcdefghijklmnop \n"),
    *(b"ab", b"bc", b"abc", b" the", b"stop", b"st", b"op"),
    *(
        b"\xc3",
        b"\xa9",
        b"\xf0\x9f",
        b"\x8e\x89",
        b"\xc3\xbc",
        b"\xe6\x97\xa5",
        b"\xe6\x97",
        b"\xa5",
    ),
]
EOS = len(PIECES)
NUM_TOKENS = EOS + 1
CONTEXT = 512

TARGET = TransformerShape(
    vocab_size=48,  # rows of padding behind the tokenizer's ids
    num_layers=1,
    width=32,
    num_heads=16,
    num_kv_heads=8,
    head_dim=4,
    mlp_width=64,
    context=CONTEXT,
    tied_head=False,
)
TRIMMED_IDS = np.array([0, 1, 2, 4, 7, 9, 11, 13, 16, 18, 19, 21, 24, 25, 26, EOS], np.int32)
# It has room for less text than the target, too.
TRIMMED = dataclasses.replace(TARGET, head_vocab=len(TRIMMED_IDS), context=48)

HOST_16 = Topology(name="host_16", platform="cpu", axes=("x", "y", "z"), sizes=(2, 2, 4))


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A vocabulary whose ids are PIECES and one end token; text becomes its longest pieces."""

    kind: str = "bytes"
    drops_space: bool = False

    @property
    def pieces(self):
        return (*map(Piece, PIECES), Piece(b"<end>", control=True))

    def encode(self, text, *, first, controls):
        data, ids = text.encode(), []
        while data:
            piece = max((p for p in PIECES if data.startswith(p)), key=len)
            ids.append(PIECES.index(piece))
            data = data[len(piece) :]
        return ids

    def serialize(self):
        return b""


TOKENIZER = Tokenizer(vocabulary=Pieces(), eos_ids=(EOS,))


@functools.cache
def target_params():
    """Random, with a head sharp enough that drafts are rejected."""
    params = random_params(TARGET, seed=0)
    return {**params, "head": params["head"] * 4.0}


def random_params(shape, seed):
    """Parameters as `init_params` draws them, without its compilation."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if path[-1].key.endswith("norm"):
            return jnp.ones(leaf.shape, leaf.dtype)
        fan_in = np.prod(leaf.shape[1:] if path[-1].key in ("out", "down") else leaf.shape[-1:])
        return jnp.asarray(rng.normal(size=leaf.shape) * fan_in**-0.5, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(shape))


@functools.cache
def drafter_params(trimmed=False):
    """The target with noise: often right, often wrong."""
    target, noise = target_params(), random_params(TARGET, seed=1)
    layers = jax.tree.map(lambda a, b: a + 0.4 * b, target["layers"], noise["layers"])
    head = target["head"][TRIMMED_IDS] if trimmed else target["head"]
    ids = jnp.asarray(TRIMMED_IDS) if trimmed else None
    return DrafterParams({**target, "layers": layers, "head": head}, ids)


@functools.cache
def counting_params():
    """A target that says id t + 1 behind id t, whatever came before: PIECES in their order."""
    params = jax.tree.map(jnp.zeros_like, target_params())
    embedding = np.random.default_rng(3).normal(size=(TARGET.vocab_size, TARGET.width))
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    return {
        **params,
        "embedding": jnp.asarray(embedding, jnp.float32),
        "norm": jnp.ones(TARGET.width),
        "head": jnp.asarray(20 * np.roll(embedding, 1, axis=0), jnp.float32),
    }


def _both(model):
    # Two tokens back, so that a random text has rounds of both kinds.
    return LookupFirst(Ngram(NUM_TOKENS, shortest=2), model)


def kinds():
    """name -> (drafter, params) of every kind."""
    return {
        "autoregressive": (Autoregressive(TARGET), drafter_params()),
        "trimmed": (Autoregressive(TRIMMED), drafter_params(trimmed=True)),
        "itself": (Autoregressive(TARGET), DrafterParams(target_params(), None)),
        "ngram": (Ngram(NUM_TOKENS, shortest=1), None),
        "both": (_both(Autoregressive(TARGET)), drafter_params()),
        "both-trimmed": (_both(Autoregressive(TRIMMED)), drafter_params(trimmed=True)),
        "uniform": (Blind(NUM_TOKENS), jnp.zeros(NUM_TOKENS)),
        "one-hot": (Blind(NUM_TOKENS), 100.0 * jnp.eye(NUM_TOKENS)[3]),
    }


def pair(drafter=None, k=0, rule="token", **engine):
    """A pair on one device; `drafter` is one of `kinds`."""
    drafter, drafter_weights = kinds()[drafter] if drafter else (None, None)
    made = Pair(
        engine=Engine(
            shape=TARGET,
            num_tokens=NUM_TOKENS,
            eos_ids=(EOS,),
            drafter=drafter,
            k=k,
            rule=rule,
            **engine,
        ),
        weights=Weights(target_params(), drafter_weights),
        tokenizer=TOKENIZER,
        context=CONTEXT,
    )
    return made.drafting(k, rule)


def counting(k=8, rule="block"):
    """The counting target, drafting for itself: whole blocks are accepted."""
    served = pair("autoregressive", k, rule)
    weights = Weights(counting_params(), DrafterParams(counting_params(), None))
    return dataclasses.replace(served, weights=weights)


def on_mesh(served, chips_per_copy=0, leader=False):
    """The same pair on 16 host devices."""
    engine, everywhere = served.engine, HOST_16.placement()
    weights = served.weights._replace(target=everywhere.put(TARGET, served.weights.target))
    drafter, placement = engine.drafter, None
    if model := model_in(drafter):
        placement = HOST_16.placement(1 if leader else chips_per_copy)
        own = served.weights.drafter
        ids = None if own.ids is None else jax.device_put(own.ids, placement.sharding())
        weights = weights._replace(
            drafter=DrafterParams(placement.put(model.shape, own.weights), ids)
        )
        model = dataclasses.replace(model, shape=placement.served_shape(model.shape))
        both = isinstance(drafter, LookupFirst)
        drafter = dataclasses.replace(drafter, model=model) if both else model
    engine = dataclasses.replace(
        engine,
        shape=everywhere.served_shape(TARGET),
        drafter=drafter,
        placement=everywhere,
        drafter_placement=placement,
        leader=leader,
    )
    return dataclasses.replace(served, engine=engine, weights=weights)


def random_prompts(lengths, seed=0):
    """Token ids of prompts of these lengths, no end token among them."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, EOS, length).tolist()) for length in lengths]


GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(max_tokens=40, seed=7)
NUCLEUS = SamplingParams(temperature=0.8, top_p=0.8, max_tokens=40, seed=8)
# Programs depend on what a job uses: with one job for all tests, each engine is compiled once.
JOB = (GREEDY, SAMPLED, NUCLEUS)


def ask(tokens, params=GREEDY, index=0):
    return Prompt(index=index, text="", tokens=tuple(tokens), params=params)


def ask_all(prompts, params=GREEDY):
    """One request per prompt; `params` is for all of them or one for each."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    return [ask(*pair, index) for index, pair in enumerate(zip(prompts, each, strict=True))]


def serve(served, prompts, **options):
    return decode(served, prompts, job=JOB, **options)


def requests_for(prompts, params, limit=100):
    batch = len(prompts)
    return Requests(
        warp=make_warp(params, NUM_TOKENS, job=JOB),
        penalties=None,
        seed=jnp.arange(batch, dtype=jnp.uint32),
        limit=jnp.full((batch,), limit, jnp.int32),
        ignore_eos=jnp.ones((batch,), bool),
    )


def start(served, prompts, params):
    """Requests that do not end soon, and the state behind their prompts."""
    requests = requests_for(prompts, params)
    return requests, prefill.start(served.engine, served.weights, requests, prompts, 128, 128)
