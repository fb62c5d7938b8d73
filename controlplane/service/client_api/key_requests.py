"""Keys that admins list, add and revoke, while the controller runs."""

from __future__ import annotations

from controlplane.service.client_api.pages import numbered, page_of
from controlplane.service.key_table import KeyTable
from schemas.link import Identity
from schemas.messages.keys import AddKey, Keys, ListKeys, RevokeKey

KeyRequest = AddKey | ListKeys | RevokeKey


def answer_about_keys(table: KeyTable, request: KeyRequest, who: Identity) -> Keys:
    """Do what is asked, and say what came of it.

    Raises:
        OnesError: if it cannot be done.
    """
    match request:
        case AddKey():
            return Keys(keys=(table.add(request, who.name),))
        case RevokeKey(key=key):
            return Keys(keys=table.revoke(key, who.name))
        case ListKeys(cursor=cursor):
            lists, following = page_of({"keys": numbered(list(table.rows()))}, cursor)
            return Keys(keys=lists["keys"], next=following)
