"""The OpenAI wire format: models, server-sent events, chat templates, detokenizing."""
