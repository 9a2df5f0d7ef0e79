"""What tests of Trainers train on, and their arguments."""

import torch

TEXT = 40  # samples: at an accumulation of 3 the last step of an epoch is shorter
STEPS = 6


def samples():
    """Samples of unequal length and numbers of labels: the token mean over ranks is no mean of means."""
    made = []
    for k in range(TEXT):
        generator = torch.Generator().manual_seed(k)
        ids = torch.randint(1, 97, (4 + 5 * (k % 4),), generator=generator)
        labels = ids.clone()
        labels[: 1 + 3 * (k % 3)] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def arguments(cls, folder, **given):
    common = {
        "output_dir": folder,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.0,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "optim": "adamw_torch",
        "dataloader_pin_memory": False,
    }
    return cls(**{**common, **given})


def history(trainer, key="loss"):
    return [row[key] for row in trainer.state.log_history if key in row]
