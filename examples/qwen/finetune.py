"""The original fine-tuning script's command line, run by shardglass: start it with torchrun, flags as before."""

from shardglass.hf.train import main

if __name__ == "__main__":
    main(defaults={"label_policy": "qwen"})
