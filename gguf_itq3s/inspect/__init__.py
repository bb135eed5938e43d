"""Looking at files and checkpoints: contents, errors against the original, sizes before anything is converted."""
