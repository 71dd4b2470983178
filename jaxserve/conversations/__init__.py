"""Conversations: turns that build on each other, and the journal that keeps them."""

from jaxserve.conversations.conversation import Conversation, Conversations, TurnClient
from jaxserve.conversations.journal import Journal, JournalEntry, check_journal
from jaxserve.conversations.turns import History, Message, Turn

__all__ = [
    "TurnClient",
    "Conversation",
    "Conversations",
    "JournalEntry",
    "History",
    "Journal",
    "Message",
    "Turn",
    "check_journal",
]
