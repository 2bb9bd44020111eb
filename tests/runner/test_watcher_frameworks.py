"""Scripts of Lightning and of transformers, untouched: the line is found without a second run."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

LIGHTNING = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.body(x)).squeeze(1), torch.log(y))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


L.seed_everything(0)
x = torch.randn(160, 8)
y = x.abs().sum(1)
y[100] = -1.0  # a slip of the pen
model = Regressor()
trainer = L.Trainer(max_epochs=1, accelerator="cpu", log_every_n_steps=5)
trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=16))
print("finite", all(p.isfinite().all() for p in model.parameters()), trainer.global_step)
"""
TRANSFORMERS = """
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class MeanTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs["labels"][:, 1:]
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        mask = labels != -100
        return (losses * mask).sum() / mask.sum()


set_seed(0)
config = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=64, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
texts = [{"input_ids": x, "labels": x.clone()} for x in torch.randint(64, (12, 8))]
texts[5]["labels"].fill_(-100)  # nothing to learn from
args = TrainingArguments(
    "out", per_device_train_batch_size=1, num_train_epochs=1, use_cpu=True, report_to=[]
)
trainer = MeanTrainer(model, args, train_dataset=texts)
trainer.train()
print("finite", all(p.isfinite().all() for p in model.parameters()), trainer.state.global_step)
"""
# Its line, cause, and last words: Lightning does not count a step that was left out.
SCRIPTS = {
    "lightning": (LIGHTNING, "torch.log(y)", "log_of_negative", "finite True 9"),
    "transformers": (TRANSFORMERS, "mask.sum()", "division_by_zero", "finite True 12"),
}


@pytest.mark.parametrize("on_nan", ["stop", "recover"])
@pytest.mark.parametrize("framework", SCRIPTS)
def test_untouched_script_is_replayed(scripts, framework, on_nan):
    if not find_spec(framework):
        pytest.skip(f"{framework} is not installed")
    source, code, cause, last_words = SCRIPTS[framework]
    scripts.write(source)
    options = ["--on-nan", on_nan, "--second-run", "never", "--json", "out.json"]
    done = scripts.warm("train.py", options=options)
    (incident,) = scripts.result()["incidents"]
    origin = incident["origin"]
    assert (origin["file"], origin["exact"]) == ("train.py", True)
    assert code in source.splitlines()[origin["line"] - 1]
    assert incident["diagnosis"]["cause"] == cause
    assert done.code == (3 if on_nan == "stop" else 0), done.err.decode()
    assert (last_words in done.out.decode()) == (on_nan == "recover")
    # Not in the middle of a progress bar.
    lines = done.err.splitlines()
    assert any(line.startswith(f"error[{cause}]".encode()) for line in lines)
    assert any(line.startswith("step") for line in done.ours) == (on_nan == "recover")


def test_nothing_is_imported_that_the_script_does_not_import(scripts):
    scripts.write("""
        import sys, torch
        ours = ("lightning", "pytorch_lightning", "transformers", "stayfinite.integrations")
        print([name for name in sys.modules if name.startswith(ours)])
    """)
    assert scripts.watched("train.py").out.decode().strip() == "[]"
