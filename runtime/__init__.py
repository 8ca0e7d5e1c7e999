"""What executes a rewritten model: collectives with autograd, stages, the engine, process launch."""
