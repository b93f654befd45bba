"""OpenAI's API: chat and text completions, embeddings, models; and vLLM's own /generate, which builds on
it."""
