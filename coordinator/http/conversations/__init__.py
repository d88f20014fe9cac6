"""OpenAI's Conversations API, /v1/conversations: lists of items that responses go on with and add to."""
