-- The outbox: what is to be said on a platform, written in the transaction of its cause.

-- One row a chat; its lock gives deliveries their numbers, so that their order is that of the commits.
-- chat_ref is `dm:<external id>` for an account's own chat.
create table chats (
  tenant_id  uuid   not null constraint chats_tenant_fkey references tenants (id),
  platform   text   not null,
  scope      text   not null,
  chat_ref   text   not null,
  next_seq   bigint not null default 1,
  constraint chats_pkey primary key (tenant_id, platform, scope, chat_ref)
);
select install_tenant_policy('chats');
grant select, insert, update, delete on chats to throughline_service;

--   identity_id  the account it is for, where it is for one
--   payload      what is said: {"text": …}
--   state        pending until a bridge has taken it; cancelled ones are never given out
create table deliveries (
  tenant_id    uuid        not null,
  id           uuid        not null,
  platform     text        not null,
  scope        text        not null,
  chat_ref     text        not null,
  seq          bigint      not null,
  kind         text        not null constraint deliveries_kind_known
               check (kind in ('reply', 'handoff', 'notice', 'security')),
  identity_id  uuid,
  payload      jsonb       not null,
  state        text        not null default 'pending' constraint deliveries_state_known
               check (state in ('pending', 'leased', 'delivered', 'dead', 'cancelled')),
  attempt      integer     not null default 0,
  visible_at   timestamptz not null,
  created_at   timestamptz not null,
  constraint deliveries_pkey primary key (tenant_id, id),
  constraint deliveries_in_order unique (tenant_id, platform, scope, chat_ref, seq),
  constraint deliveries_chat_fkey foreign key (tenant_id, platform, scope, chat_ref)
    references chats (tenant_id, platform, scope, chat_ref) on delete cascade,
  constraint deliveries_identity_fkey foreign key (tenant_id, identity_id)
    references identities (tenant_id, id) on delete cascade
);
create index deliveries_of_identity on deliveries (tenant_id, identity_id);
create index deliveries_pending on deliveries (tenant_id, platform, visible_at) where state = 'pending';
select install_tenant_policy('deliveries');
grant select, insert, update, delete on deliveries to throughline_service;
