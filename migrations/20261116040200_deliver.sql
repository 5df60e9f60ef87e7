-- What bridges fetch, and what they bring in.

-- The chat as a bridge described it, so that it is told back the same way; null until a bridge did.
alter table chats add column chat jsonb;

--   lease          names one hand-out: only who has it may end it
--   visible_at     pending: from when on it may be given out; leased: when it is given out again
--   turn_id        whose answer it is. A turn that ends twice gives one reply
--   in_reply_to    the platform's id of the message that it answers
--   error          what the bridge said when it could not deliver
alter table deliveries
  add column lease                uuid,
  add column turn_id              uuid,
  add column session_id           uuid,
  add column conversation_id      uuid,
  add column in_reply_to          text,
  add column error                text,
  add column external_message_id  text,
  add column ended_at             timestamptz,
  add constraint deliveries_leased_have_a_lease check ((state = 'leased') = (lease is not null));
-- Several consumers of one bridge: one in flight per chat.
create unique index deliveries_one_in_flight on deliveries (tenant_id, platform, scope, chat_ref)
  where state = 'leased';
create unique index deliveries_once_a_turn on deliveries (tenant_id, turn_id, kind) where turn_id is not null;
create index deliveries_open on deliveries (tenant_id, platform, scope, chat_ref, seq)
  where state in ('pending', 'leased');
create index deliveries_dead on deliveries (tenant_id, created_at, id) where state = 'dead';
drop index deliveries_pending;

-- Where the answer of a turn goes. `http`: to who waits for it, until they have it (`told`) or it has become
-- a delivery. One conditional update decides which, so that it is never both and never none.
alter table turns
  add column reply_to   jsonb,
  add column reply_via  text constraint turns_reply_via_known check (reply_via in ('http', 'told', 'delivery'));
create index turns_untold on turns (tenant_id, ended_at) where reply_via = 'http' and ended_at is not null;

-- A message of a platform is taken once, however often it is brought; a command too, whose answer is kept
-- (sealed: it can hold a code). Equal ids of two senders are two messages.
--
--   edited   what the message was changed to after its turn had begun; it is only kept
--   sent_at  when it was sent, as the bridge says
create table inbound_receipts (
  tenant_id   uuid        not null,
  platform    text        not null,
  scope       text        not null,
  chat_ref    text        not null,
  identity_id uuid        not null,
  message_id  text        not null,
  turn_id     uuid,
  answer_enc  bytea,
  edited      jsonb,
  sent_at     timestamptz,
  created_at  timestamptz not null,
  constraint inbound_receipts_pkey primary key (tenant_id, platform, scope, chat_ref, identity_id, message_id),
  constraint inbound_receipts_identity_fkey foreign key (tenant_id, identity_id)
    references identities (tenant_id, id) on delete cascade
);
create index inbound_receipts_by_age on inbound_receipts (tenant_id, created_at);
create index inbound_receipts_of_identity on inbound_receipts (tenant_id, identity_id);
select install_tenant_policy('inbound_receipts');
grant select, insert, update, delete on inbound_receipts to throughline_service;

-- A link that waits for its confirmation in the chat: the code, sealed, for two minutes.
create table pending_links (
  tenant_id    uuid        not null,
  identity_id  uuid        not null,
  code_enc     bytea       not null,
  expires_at   timestamptz not null,
  constraint pending_links_pkey primary key (tenant_id, identity_id),
  constraint pending_links_identity_fkey foreign key (tenant_id, identity_id)
    references identities (tenant_id, id) on delete cascade
);
select install_tenant_policy('pending_links');
grant select, insert, update, delete on pending_links to throughline_service;

-- What was taken back by /undo keeps its place and its number, and is shown to no model.
alter table messages add column undone_at timestamptz;

-- Answers that nobody fetched by HTTP: for the sweepers.
create function due_replies(p_limit integer) returns table (tenant_id uuid, id uuid)
language sql stable security definer
set search_path = pg_catalog, public
as $$
  select t.tenant_id, t.id
    from turns t
   where t.reply_via = 'http'
     and t.ended_at < clock_timestamp() - interval '5 seconds'
   order by t.ended_at
   limit p_limit
$$;
alter function due_replies(integer) owner to throughline_definer;
revoke execute on function due_replies(integer) from public;
grant execute on function due_replies(integer) to throughline_service;

select install_definer_erase('inbound_receipts');
select install_definer_erase('pending_links');

create or replace function erase_tenant(p_tenant_id uuid, p_limit integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, public
as $$
declare
  target  text;
  erased  integer;
begin
  if not exists (select 1 from tenants where id = p_tenant_id and state = 'deleting') then
    return 0;
  end if;
  foreach target in array array['idempotency', 'api_keys', 'usage_hourly', 'issuers', 'agents',
                                'events', 'turns', 'inbound_receipts', 'pending_links',
                                'messages', 'conversation_grants', 'slot_conversations', 'conversations',
                                'deliveries', 'chats', 'codes', 'code_attempts', 'home_channels',
                                'identity_presence', 'identity_moves', 'user_redirects', 'erased_people',
                                'slot_names', 'slots', 'spent_session_ids', 'retention_sweeps',
                                'identities', 'users', 'audit', 'audit_heads'] loop
    execute format(
      'delete from %1$I where tenant_id = $1 and ctid = any (array(
         select ctid from %1$I where tenant_id = $1 limit $2))', target)
      using p_tenant_id, p_limit;
    get diagnostics erased = row_count;
    if erased > 0 then
      return erased;
    end if;
  end loop;
  delete from jobs where tenant_id = p_tenant_id;
  delete from tenants where id = p_tenant_id;
  return 0;
end
$$;
