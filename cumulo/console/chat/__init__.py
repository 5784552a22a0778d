"""The chat page's parts: conversations, answers, and what is drawn of them. Put together by chat_page.py."""
