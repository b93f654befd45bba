"""Text generation: MindIE's API, TGI's, vLLM's and OpenAI's, over one engine."""
