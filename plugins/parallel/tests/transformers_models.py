"""In a rank of a test's world: train tiny models of transformers, by the Trainer and by a loop of the user's own."""

import torch
from torch.utils.data import DataLoader

import torchhal
from torchhal import Trainer

SAMPLES, BATCH, LENGTH, WORDS = 24, 8, 10, 48
NEW_TOKENS = 5


def bert(**options):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
            **options,
        )
    )  # fmt: skip


def _tokens():
    """No token ends a text before its length, so that each rank generates the same number of tokens."""
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, **_tokens(), **options,
        )
    )  # fmt: skip


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, **_tokens(), **options,
        )
    )  # fmt: skip


def qwen3():
    """With norms of each head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=32, **_tokens(),
        )
    )  # fmt: skip


def mixtral():
    """With experts, whose parameters are joined."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=2, max_position_embeddings=32, **_tokens(),
        )
    )  # fmt: skip


MODELS = {
    "bert": bert,
    # what a pipeline follows once may neither write into its config nor make a cache
    "bert with problem type": lambda: bert(problem_type="single_label_classification"),
    "llama": llama,
    "llama without cache": lambda: llama(use_cache=False),
    "tied llama": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "gpt2 untied": lambda: gpt2(tie_word_embeddings=False, use_cache=False),
    "qwen3": qwen3,
    "mixtral": mixtral,
}


def generates(name):
    return not name.startswith("bert")


def samples(name):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, WORDS, (SAMPLES, LENGTH), generator=generator)
    labels = tokens if generates(name) else torch.randint(0, 3, (SAMPLES,), generator=generator)
    columns = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    return [{name: column[index] for name, column in columns.items()} for index in range(SAMPLES)]


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def evaluated(model, batch):
    """What an evaluation makes of a batch: the next tokens, or the logits."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if not hasattr(model, "generate") or not generates(model.config.model_type):
        return model(**inputs).logits
    return model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)


def plain(name):
    """(losses, what the evaluation of the first samples gives, weights) of the loop in one process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = MODELS[name]()
    optimizer, losses = optimizer_of(model), []
    model.train()
    for batch in DataLoader(samples(name), BATCH):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        found = torch.cat([evaluated(model, batch) for batch in DataLoader(samples(name)[:BATCH], BATCH // 2)])
    torch.set_num_threads(before)
    return losses, found, {key: value.clone() for key, value in model.state_dict().items()}


class Language(torchhal.Module):
    """A model of transformers under the Trainer."""

    def __init__(self, name):
        super().__init__()
        self.model = MODELS[name]()
        self.losses, self.found = [], []

    def forward(self, **batch):
        return self.model(**batch)

    def training_step(self, batch, batch_idx):
        loss = self(**batch).loss
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.found.append(evaluated(self.model, batch))

    def configure_optimizers(self):
        return optimizer_of(self)


class Losses(torchhal.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.losses.append(float(trainer.callback_metrics.get("loss", float("nan"))))
        module.leads = trainer.strategy.is_data_leader


def by_trainer(name, strategy, is_evaluated=True):
    """What a rank has of a fit: losses, what the evaluation gave, the weights, and whether these are others' too."""
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, callbacks=[Losses()],
    )  # fmt: skip
    module = Language(name)
    module.train_dataloader = lambda: DataLoader(samples(name), BATCH // replicas(trainer.strategy))
    trainer.fit(module, val_dataloaders=DataLoader(samples(name)[:BATCH], BATCH // 2) if is_evaluated else None)
    found = torch.cat(module.found) if module.found else None
    state = {key.removeprefix("model."): value.clone() for key, value in module.state_dict().items()}
    return {**found_by(trainer.strategy, module.losses, found, state), "leads": module.leads}


def by_run(name, strategy, how="calls", is_evaluated=True):
    """As :func:`by_trainer`, of a loop of the user's own that calls the model, or by ``forward_backward``."""
    run = torchhal.Run(accelerator="cpu", devices=2, strategy=strategy)
    model = MODELS[name]()
    optimizer, loader = optimizer_of(model), DataLoader(samples(name), BATCH // (2 if strategy in SHARED_OUT else 1))
    losses, found = [], []
    with run:
        model, optimizer, loader = run.setup(model, optimizer, loader)
        model.train()
        for batch in run.batches(loader):
            optimizer.zero_grad()
            if how == "calls":
                loss = model(**batch).loss
                run.backward(loss)
            else:
                loss = run.forward_backward(lambda batch: model(**batch).loss, batch)
            optimizer.step()
            losses.append(float("nan") if loss is None else float(loss.detach()))
        if is_evaluated:
            model.eval()
            with torch.no_grad():
                for batch in run.evaluation_batches(DataLoader(samples(name)[:BATCH], BATCH // 2)):
                    found.append(evaluated(model, batch))
        kept = found_by(run._strategy, losses, torch.cat(found) if found else None, {})
    return {**kept, "state": {key: value.clone() for key, value in model.state_dict().items()}}


SHARED_OUT = ("ddp", "zero1", "zero3")
"""Strategies under which each of two ranks has its own half of a batch."""


def replicas(strategy):
    """Ranks with other samples."""
    return (strategy.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]


def found_by(strategy, losses, found, state):
    return {
        "losses": losses, "found": found, "state": state, "replicas": replicas(strategy),
        "leads": strategy.is_data_leader,
    }  # fmt: skip


def uneven_texts():
    """(prompts, a token that ends the text of the first at once and that of the second never, the texts)."""
    model = llama().eval()
    prompts = torch.stack([sample["input_ids"] for sample in samples("llama")])
    texts = model.generate(prompts, max_new_tokens=NEW_TOKENS, do_sample=False)[:, LENGTH:]
    for first, text in enumerate(texts):
        for second, other in enumerate(texts):
            if text[0] not in other:
                pair, end = prompts[[first, second]], int(text[0])
                return pair, end, [written(model, prompt, end) for prompt in pair]
    raise AssertionError("no such texts: take other seeds")


def written(model, prompt, end, **options):
    with torch.no_grad():
        return model.generate(
            prompt[None], max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=end, pad_token_id=0, **options
        )


def written_unevenly(strategy, prompts, end):
    """The text of this rank's prompt, whose model the ranks have in parts."""
    run = torchhal.Run(accelerator="cpu", devices=2, strategy=strategy)
    with run:
        model = run.setup(llama()).eval()
        return written(model, prompts[run.global_rank], end, synced_gpus=True)
