"""From text to batches: tokenizer, token shards, the order of training; recall data and needle documents."""
