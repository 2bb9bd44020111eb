"""Synthetic shop: item texts as hashed bags of words, users with tastes, a click log."""
import csv
import json
import os

import numpy as np

TOPICS = {
    "garden": "spade soil seed rake hose pot fern hedge".split(),
    "kitchen": "knife pan oven whisk bowl apron grater tray".split(),
    "office": "pen stapler folder desk lamp paper clip printer".split(),
    "sport": "ball racket net shoe jersey whistle bat glove".split(),
}
VOCAB = sorted({w for words in TOPICS.values() for w in words})


def write_catalogue(path, n_items, rng):
    names = list(TOPICS)
    with open(path, "w") as f:
        for i in range(n_items):
            topic = names[int(rng.integers(len(names)))]
            words = list(rng.choice(TOPICS[topic], size=int(rng.integers(2, 6))))
            if rng.random() < 0.0008:
                words = ["gift", "voucher", str(int(rng.integers(5, 50)))]
            f.write(json.dumps({"item": i, "topic": topic, "text": " ".join(words)}) + "\n")


def write_clicks(path, items, n_users, per_user, rng):
    names = list(TOPICS)
    by_topic = {t: [it["item"] for it in items if it["topic"] == t] for t in names}
    with open(path, "w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["user", "item"])
        rows = []
        for u in range(n_users):
            taste = rng.dirichlet(np.full(len(names), 0.3))
            for _ in range(per_user):
                topic = names[int(rng.choice(len(names), p=taste))]
                rows.append((u, int(rng.choice(by_topic[topic]))))
        rng.shuffle(rows)
        out.writerows(rows)


def prepare(folder, n_items=1500, n_users=150, per_user=12, seed=0):
    os.makedirs(folder, exist_ok=True)
    items_path, clicks_path = os.path.join(folder, "items.jsonl"), os.path.join(folder, "clicks.csv")
    rng = np.random.default_rng(seed)
    if not os.path.exists(items_path):
        write_catalogue(items_path, n_items, rng)
    with open(items_path) as f:
        items = [json.loads(line) for line in f]
    if not os.path.exists(clicks_path):
        write_clicks(clicks_path, items, n_users, per_user, rng)
    with open(clicks_path) as f:
        clicks = np.array([(int(r["user"]), int(r["item"])) for r in csv.DictReader(f)])
    return items, clicks


def bag_of_words(items):
    index = {w: i for i, w in enumerate(VOCAB)}
    bags = np.zeros((len(items), len(VOCAB)), np.float32)
    for row, item in enumerate(items):
        for word in item["text"].split():
            if word in index:
                bags[row, index[word]] += 1
    return bags
