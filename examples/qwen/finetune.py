"""The original fine-tuning script's command line, run by shardglass: start it with torchrun, flags as before."""

from shardglass.cli import finetune

if __name__ == "__main__":
    finetune(defaults={"label_policy": "qwen"})
