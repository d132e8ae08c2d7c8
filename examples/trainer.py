"""A small Llama trained by transformers' Trainer, saved and resumed by Shardfast.

The second call goes on where the first one, or one that was killed, has saved last, on any number of processes::

    python examples/trainer.py ./run --steps 20
    torchrun --nproc-per-node 2 examples/trainer.py ./run --steps 30
"""

import argparse

import shardfast.integrations.transformers
import torch
import transformers

LENGTH, WORDS = 16, 64


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Texts that count in steps of one size."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(LENGTH) * (number % 7 + 1) + number) % WORDS
        return {"input_ids": ids, "labels": ids}


class Print(transformers.TrainerCallback):
    def on_log(self, args, state, control, logs=None, **more) -> None:  # type: ignore[no-untyped-def]
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}: loss {logs['loss']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the directory of the training")
    parser.add_argument("--steps", type=int, default=20, help="train up to this step")
    given = parser.parse_args()

    transformers.set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, attention_dropout=0.1, **sizes))
    args = transformers.TrainingArguments(
        given.run,
        max_steps=given.steps,
        save_steps=10,
        save_total_limit=2,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
    )
    trainer = transformers.Trainer(model, args, train_dataset=Sequences(), callbacks=[Print()])
    shardfast.integrations.transformers.attach(trainer)
    trainer.train(resume_from_checkpoint=True)  # the newest committed checkpoint, or a fresh start


if __name__ == "__main__":
    main()
