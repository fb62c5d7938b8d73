"""Train a small GPT-2, from nothing, on CPython's help texts with Hugging Face's Trainer."""

from dataset import CONTEXT, load_split
from elastic.transformers import ElasticTrainer
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

EPOCHS = 4

set_seed(0)
config = GPT2Config(
    vocab_size=256,
    n_positions=CONTEXT,
    n_embd=64,
    n_layer=2,
    n_head=4,
    bos_token_id=0,
    eos_token_id=0,
)
model = GPT2LMHeadModel(config)
train_set, eval_set = load_split()
arguments = TrainingArguments(
    output_dir="out",
    seed=0,
    num_train_epochs=EPOCHS,
    per_device_train_batch_size=32,
    per_device_eval_batch_size=256,
    learning_rate=3e-3,
    weight_decay=0.1,
    warmup_steps=100,
    lr_scheduler_type="cosine",
    eval_strategy="epoch",
    save_strategy="no",
    logging_steps=100,
    report_to="none",
    disable_tqdm=True,
)
trainer = ElasticTrainer(
    model=model, args=arguments, train_dataset=train_set, eval_dataset=eval_set
)
trainer.train()
