"""Builds the toy corpus, the token file and the neighbour index used for retrieval."""
import json
import os

import numpy as np

SUBJECTS = ["the pump", "a valve", "the rotor", "one bearing", "the inlet", "the filter"]
VERBS = ["was replaced", "is leaking", "was inspected", "is noisy", "was cleaned", "runs hot"]
PLACES = ["on deck two", "in bay four", "near the boiler", "at the stern", "in the workshop"]
NOTES = ["see log.", "no action.", "order parts.", "retest at noon.", "signed off."]


def _report(rng, sentences):
    parts = []
    for _ in range(sentences):
        parts.append(" ".join([rng.choice(SUBJECTS), rng.choice(VERBS), rng.choice(PLACES)]) + "; " + rng.choice(NOTES))
    return " ".join(parts) + "\n"


def _part_list(rng, rows):
    digits = "0123456789-/ABXZ"
    return "".join(rng.choice(list(digits), size=rows * 16)) + "\n"


def build_documents(rng, n_docs):
    docs = []
    for i in range(n_docs):
        if i == 97:
            docs.append(_part_list(rng, 4))
        else:
            docs.append(_report(rng, int(rng.integers(3, 7))))
    return docs


def _grams(tokens, n=4):
    return {tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)}


def build_neighbours(chunks, doc_of, k, min_shared):
    """The k chunks of other documents that share most 4-grams; -1 fills up."""
    inverted = {}
    grams = [_grams(c.tolist()) for c in chunks]
    for i, gs in enumerate(grams):
        for g in gs:
            inverted.setdefault(g, []).append(i)
    table = np.full((len(chunks), k), -1, dtype=np.int64)
    for i, gs in enumerate(grams):
        shared = {}
        for g in gs:
            for j in inverted[g]:
                if doc_of[j] != doc_of[i]:
                    shared[j] = shared.get(j, 0) + 1
        best = sorted((j for j, n in shared.items() if n >= min_shared), key=lambda j: (-shared[j], j))[:k]
        table[i, :len(best)] = best
    return table


def prepare(cfg):
    os.makedirs(cfg.data_dir, exist_ok=True)
    meta_path = os.path.join(cfg.data_dir, "meta.json")
    if os.path.exists(meta_path):
        return json.load(open(meta_path))
    rng = np.random.default_rng(cfg.seed)
    docs = build_documents(rng, 240)
    vocab = sorted(set("".join(docs)))
    stoi = {c: i + 1 for i, c in enumerate(vocab)}  # 0 is padding
    chunks, doc_of = [], []
    for d, text in enumerate(docs):
        ids = [stoi[c] for c in text]
        for s in range(0, len(ids), cfg.chunk):
            piece = ids[s:s + cfg.chunk + 1]
            if len(piece) < 8:
                continue
            chunks.append(np.array(piece + [0] * (cfg.chunk + 1 - len(piece)), dtype=np.uint16))
            doc_of.append(d)
    chunks = np.stack(chunks)
    table = build_neighbours(chunks, doc_of, cfg.neighbours, cfg.min_shared)
    chunks.tofile(os.path.join(cfg.data_dir, "chunks.bin"))
    np.save(os.path.join(cfg.data_dir, "neighbours.npy"), table)
    meta = {"vocab_size": len(vocab) + 1, "n_chunks": len(chunks), "width": cfg.chunk + 1}
    with open(meta_path, "w") as f:
        json.dump(meta, f)
    return meta
