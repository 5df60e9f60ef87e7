-- The stable side of a conversation: slots and their names. A slot is what a session key names. It
-- leads to a conversation and never to a session, so compression moves nothing here; several slots may
-- lead to one conversation.
--
--   key              the name it is shown with; its other names are in slot_names
--   user_id          the person it belongs to; null for the tenant's own
--   conversation_id  the current one; null before the first and after it was deleted
--   generation       counts the moves of the current one, so that a client can say which it saw
--   last_person_at   when a person chose the current one; the idle clock begins here
create table slots (
  tenant_id        uuid        not null constraint slots_tenant_fkey references tenants (id),
  id               uuid        not null,
  key              text        not null constraint slots_key_length check (char_length(key) between 1 and 256),
  user_id          uuid,
  agent            text        not null,
  conversation_id  uuid,
  generation       bigint      not null default 1,
  last_person_at   timestamptz not null,
  created_at       timestamptz not null,
  constraint slots_pkey primary key (tenant_id, id),
  constraint slots_user_fkey foreign key (tenant_id, user_id) references users (tenant_id, id)
);
create index slots_newest on slots (tenant_id, created_at, id);
create index slots_of_user on slots (tenant_id, user_id);
create index slots_leading_to on slots (tenant_id, conversation_id);
select install_tenant_policy('slots');
grant select, insert, update, delete on slots to throughline_service;

-- A name is unique among the names of its maker: a user's own, or the tenant's service namespace (the
-- nil uuid), which all API keys share. The primary key makes concurrent first uses of a key one slot.
create table slot_names (
  tenant_id  uuid not null,
  namespace  uuid not null,
  key        text not null,
  slot_id    uuid not null,
  constraint slot_names_pkey primary key (tenant_id, namespace, key),
  constraint slot_names_slot_fkey foreign key (tenant_id, slot_id)
    references slots (tenant_id, id) on delete cascade
);
create index slot_names_of_slot on slot_names (tenant_id, slot_id);
select install_tenant_policy('slot_names');
grant select, insert, update, delete on slot_names to throughline_service;

-- A conversation is a whole compression chain; its id is the id of the chain's first session. Its row
-- lock orders compression, undoing it, and whatever moves slots to it or away from it.
--
--   slot_id                the key it was made under: the scope of its memory, for good
--   namespace, client_id   the name its maker gave the first session, if any
--   tip_session_id         the newest link: every way into the chain goes through here
--   deleted_at             from then on it is not there for anyone; a job removes the rows
create table conversations (
  tenant_id       uuid        not null constraint conversations_tenant_fkey references tenants (id),
  id              uuid        not null,
  slot_id         uuid,
  namespace       uuid        not null,
  client_id       text        constraint conversations_client_id_length check (char_length(client_id) between 1 and 256),
  user_id         uuid,
  agent           text        not null,
  tip_session_id  uuid        not null,
  title           text        constraint conversations_title_length check (char_length(title) between 1 and 100),
  archived        boolean     not null default false,
  pinned          boolean     not null default false,
  created_at      timestamptz not null,
  deleted_at      timestamptz,
  constraint conversations_pkey primary key (tenant_id, id),
  constraint conversations_client_id_once unique (tenant_id, namespace, client_id),
  constraint conversations_slot_fkey foreign key (tenant_id, slot_id) references slots (tenant_id, id),
  constraint conversations_user_fkey foreign key (tenant_id, user_id) references users (tenant_id, id)
);
create index conversations_newest on conversations (tenant_id, tip_session_id);
create index conversations_of_user on conversations (tenant_id, user_id, tip_session_id);
create index conversations_of_slot on conversations (tenant_id, slot_id);
create index conversations_deleted on conversations (tenant_id, id) where deleted_at is not null;
select install_tenant_policy('conversations');
grant select, insert, update, delete on conversations to throughline_service;

alter table slots add constraint slots_conversation_fkey foreign key (tenant_id, conversation_id)
  references conversations (tenant_id, id) on delete set null (conversation_id);

-- Which conversations a slot knows: those made under it, and those it was switched to.
create table slot_conversations (
  tenant_id        uuid not null,
  slot_id          uuid not null,
  conversation_id  uuid not null,
  constraint slot_conversations_pkey primary key (tenant_id, slot_id, conversation_id),
  constraint slot_conversations_slot_fkey foreign key (tenant_id, slot_id)
    references slots (tenant_id, id) on delete cascade,
  constraint slot_conversations_conversation_fkey foreign key (tenant_id, conversation_id)
    references conversations (tenant_id, id) on delete cascade
);
create index slot_conversations_of_conversation on slot_conversations (tenant_id, conversation_id);
select install_tenant_policy('slot_conversations');
grant select, insert, update, delete on slot_conversations to throughline_service;

-- One link of a chain: a transcript, written at its end while it is open.
--
--   chain_parent_id  the link that this one continues; null for the first. The foreign key on
--                    (conversation, depth - 1) leaves no room for a cycle or a parent elsewhere
--   origin_id        for a reset or a branch: the session it came from, which is no part of the chain
--   undone_at        a compression that was taken back; the row stays, and its id leads to the tip
--   next_seq         the number of the next message. Taking numbers is an update of this row on
--                    condition that it is still the open end: that decides append against append, and
--                    append against compression
--   born_seq         the last number it was born with (summary and copies)
--   message_count    messages of its own: copies that compression made are not counted again
--   compression      what the compression that made this link did, to be shown
--
-- What changes with every message is in no index, and pages have room, so that such an update stays on
-- its page (HOT).
create table sessions (
  tenant_id        uuid        not null,
  id               uuid        not null,
  conversation_id  uuid        not null,
  depth            integer     not null,
  parent_depth     integer     generated always as (depth - 1) stored,
  chain_parent_id  uuid,
  origin_id        uuid,
  edge             text        constraint sessions_edge_known check (edge in ('compression', 'reset', 'branch')),
  state            text        not null constraint sessions_state_known check (state in ('open', 'ended')),
  end_reason       text        constraint sessions_end_reason_known
                   check (end_reason in ('compression', 'reset', 'idle', 'daily', 'switch', 'uncompressed')),
  undone_at        timestamptz,
  next_seq         bigint      not null default 1,
  born_seq         bigint      not null default 0,
  message_count    bigint      not null default 0,
  token_count      bigint      not null default 0,
  compression      jsonb,
  created_at       timestamptz not null,
  last_active_at   timestamptz not null,
  last_person_at   timestamptz not null,
  ended_at         timestamptz,
  constraint sessions_pkey primary key (tenant_id, id),
  constraint sessions_place unique (tenant_id, conversation_id, depth, id),
  constraint sessions_first_has_no_parent check ((depth = 0) = (chain_parent_id is null)),
  constraint sessions_later_are_compressions check ((depth > 0) = (edge is not distinct from 'compression')),
  constraint sessions_ended_completely
    check ((state = 'ended') = (ended_at is not null) and (state = 'ended') = (end_reason is not null)),
  constraint sessions_undone_are_ended check (undone_at is null or state = 'ended'),
  constraint sessions_conversation_fkey foreign key (tenant_id, conversation_id)
    references conversations (tenant_id, id) on delete cascade,
  constraint sessions_parent_fkey foreign key (tenant_id, conversation_id, parent_depth, chain_parent_id)
    references sessions (tenant_id, conversation_id, depth, id),
  constraint sessions_origin_fkey foreign key (tenant_id, origin_id)
    references sessions (tenant_id, id) on delete set null (origin_id)
) with (fillfactor = 80);
-- However many compress at once, on however many nodes: one child.
create unique index sessions_one_compression_child on sessions (tenant_id, chain_parent_id)
  where undone_at is null;
create index sessions_from_origin on sessions (tenant_id, origin_id) where origin_id is not null;
select install_tenant_policy('sessions');
grant select, insert, update, delete on sessions to throughline_service;

-- Deferred: a conversation and its first session name each other.
alter table conversations add constraint conversations_tip_fkey foreign key (tenant_id, tip_session_id)
  references sessions (tenant_id, id) deferrable initially deferred;

-- What was said. `seq` has no gap and no double within a session; nothing that was acknowledged is ever
-- changed. `content` is JSON as the client gave it (a text, a list of parts, or null): json and not
-- jsonb, because it is only stored and given back. A copy knows where it came from; that place may be
-- gone, so no foreign key leads there. The identity is kept as it was when it spoke.
create table messages (
  tenant_id       uuid        not null,
  session_id      uuid        not null,
  seq             bigint      not null,
  role            text        not null constraint messages_role_known check (role in ('system', 'user', 'assistant', 'tool')),
  kind            text        not null constraint messages_kind_known
                  check (kind in ('normal', 'summary', 'handoff', 'notice')),
  content         json,
  tool_calls      json,
  tool_call_id    text,
  identity_id     uuid,
  platform        text,
  token_count     integer     not null,
  turn_id         uuid,
  copied_session  uuid,
  copied_seq      bigint,
  created_at      timestamptz not null,
  constraint messages_pkey primary key (tenant_id, session_id, seq),
  constraint messages_copy_is_complete check ((copied_session is null) = (copied_seq is null)),
  constraint messages_session_fkey foreign key (tenant_id, session_id)
    references sessions (tenant_id, id) on delete cascade
);
select install_tenant_policy('messages');
grant select, insert, update, delete on messages to throughline_service;
