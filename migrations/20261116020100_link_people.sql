-- Linking: one person, several accounts, and everything that must follow when accounts are joined and
-- parted again.

-- named_by_import: the external id came with an import, and goes with it
alter table users
  add column named_by_import boolean not null default false;
create index users_newest on users (tenant_id, created_at, id);

--   external_id    as the platform compares ids; what the account is found by
--   raw            as whoever vouched for it wrote it
--   normalisation  the version of the rules that made the one from the other
--   linked_at      since when it belongs to its user: a person may part from newer ones only
--   imported       listed by the document that was imported last; only imports remove such links
alter table identities
  add column raw            text,
  add column normalisation  smallint    not null default 1,
  add column linked_at      timestamptz,
  add column imported       boolean     not null default false;
update identities set raw = external_id, linked_at = created_at;
alter table identities
  alter column raw set not null,
  alter column linked_at set not null,
  add constraint identities_raw_length check (char_length(raw) between 1 and 512);
create index identities_imported on identities (tenant_id, user_id) where imported;

-- Old ids of people answer as the survivor, for ever. Flattened at every merge: one hop.
create table user_redirects (
  tenant_id   uuid        not null,
  old_id      uuid        not null,
  user_id     uuid        not null,
  created_at  timestamptz not null,
  constraint user_redirects_pkey primary key (tenant_id, old_id),
  constraint user_redirects_user_fkey foreign key (tenant_id, user_id) references users (tenant_id, id)
    on delete cascade
);
create index user_redirects_of_user on user_redirects (tenant_id, user_id);
select install_tenant_policy('user_redirects');
grant select, insert, update, delete on user_redirects to throughline_service;

-- Every time an account changed its person: joined by a code, an admin or an import, parted, joined
-- again. `profile` is what the person who was merged away was called, so that nothing is discarded.
create table identity_moves (
  tenant_id    uuid        not null,
  id           uuid        not null,
  identity_id  uuid        not null,
  from_user    uuid        not null,
  to_user      uuid        not null,
  reason       text        constraint identity_moves_reason_length check (char_length(reason) between 1 and 500),
  kind         text        not null constraint identity_moves_kind_known
               check (kind in ('code', 'merge', 'import', 'unlink', 'undo')),
  profile      jsonb,
  created_at   timestamptz not null,
  undo_until   timestamptz,
  undone_at    timestamptz,
  constraint identity_moves_pkey primary key (tenant_id, id),
  constraint identity_moves_identity_fkey foreign key (tenant_id, identity_id)
    references identities (tenant_id, id) on delete cascade
);
create index identity_moves_of_identity on identity_moves (tenant_id, identity_id, created_at);
create index identity_moves_to_user on identity_moves (tenant_id, to_user, created_at);
select install_tenant_policy('identity_moves');
grant select, insert, update, delete on identity_moves to throughline_service;

-- When an account was last heard, and through which slot. Written at most once a minute.
create table identity_presence (
  tenant_id     uuid        not null,
  identity_id   uuid        not null,
  last_seen_at  timestamptz not null,
  slot_id       uuid,
  constraint identity_presence_pkey primary key (tenant_id, identity_id),
  constraint identity_presence_identity_fkey foreign key (tenant_id, identity_id)
    references identities (tenant_id, id) on delete cascade,
  constraint identity_presence_slot_fkey foreign key (tenant_id, slot_id)
    references slots (tenant_id, id) on delete set null (slot_id)
) with (fillfactor = 80);
select install_tenant_policy('identity_presence');
grant select, insert, update, delete on identity_presence to throughline_service;

-- Where a person wants to be reached on a platform.
create table home_channels (
  tenant_id    uuid        not null,
  user_id      uuid        not null,
  platform     text        not null,
  identity_id  uuid        not null,
  chat         jsonb       not null,
  updated_at   timestamptz not null,
  constraint home_channels_pkey primary key (tenant_id, user_id, platform),
  constraint home_channels_user_fkey foreign key (tenant_id, user_id)
    references users (tenant_id, id) on delete cascade,
  constraint home_channels_identity_fkey foreign key (tenant_id, identity_id)
    references identities (tenant_id, id) on delete cascade
);
create index home_channels_of_identity on home_channels (tenant_id, identity_id);
select install_tenant_policy('home_channels');
grant select, insert, update, delete on home_channels to throughline_service;

-- What a slot is for, and the account it was made through: when that account is parted from its person,
-- the slot goes with it. 'client' slots have a key that a client chose.
alter table slots
  add column kind         text not null default 'client' constraint slots_kind_known
             check (kind in ('client', 'dm', 'group', 'thread')),
  add column identity_id  uuid,
  add constraint slots_identity_fkey foreign key (tenant_id, identity_id)
    references identities (tenant_id, id) on delete set null (identity_id);
create index slots_of_identity on slots (tenant_id, identity_id) where identity_id is not null;

-- A name whose slot is not its home is an alias: linking points the DM keys of a person at the shared
-- slot, parting points them home again.
alter table slot_names
  add column home_slot_id uuid;
update slot_names set home_slot_id = slot_id;
alter table slot_names
  alter column home_slot_id set not null,
  add constraint slot_names_home_fkey foreign key (tenant_id, home_slot_id)
    references slots (tenant_id, id) on delete cascade;
create index slot_names_of_home on slot_names (tenant_id, home_slot_id);

-- The account that a guest's right came through; it ends when that account is parted from the guest.
alter table conversation_grants
  add column identity_id uuid,
  add constraint conversation_grants_identity_fkey foreign key (tenant_id, identity_id)
    references identities (tenant_id, id) on delete set null (identity_id);

-- Parting asks which accounts spoke in a conversation.
create index messages_of_identity on messages (tenant_id, identity_id, session_id)
  where identity_id is not null;
